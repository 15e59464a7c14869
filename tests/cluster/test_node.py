"""The local Ray: refused where it would be too small, and nothing left of it afterwards."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from logra_lab.cluster import guardian
from logra_lab.cluster.node import Needs, start
from logra_lab.errors import InputError
from logra_lab.rl.config import make_config

ROOT = Path(__file__).resolve().parents[2]


def test_needs_count_every_rank_of_every_engine_and_place_trainers_first():
    needs = Needs(trainers=2, engines=3, tensor_parallel=4, gpus=True)
    assert needs.total() == {"CPU": 14.0, "GPU": 14.0}
    assert needs.bundles()[1:3] == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 4.0}]
    assert Needs.of(make_config(engine="hf", engines=2, trainers=1)).total()["CPU"] == 3.0


def test_gpus_that_are_not_there_are_refused_before_anything_is_started(ray_node, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(InputError, match=r"this machine has 2 GPUs, the run needs 8 \(4 trainers"):
        start(None, Needs(trainers=4, engines=4, gpus=True))


def test_a_cluster_that_is_too_small_is_refused_at_once_with_what_is_there(ray_node):
    with pytest.raises(InputError, match=r"has 4 CPUs, the run needs 12 .*6 engines .* 2 ranks"):
        start("auto", Needs(engines=6, tensor_parallel=2))


def test_places_that_others_hold_are_not_waited_for_for_ever(ray_node, monkeypatch):
    monkeypatch.setattr("logra_lab.cluster.node._PLACEMENT_SECONDS", 1.0)
    with (
        start(None, Needs(engines=3)),
        pytest.raises(Exception, match=r"did not give 2 engines.* within 1 s; free are .*'CPU': 1"),
    ):
        start(None, Needs(engines=2))
    start(None, Needs(engines=4)).stop()  # both have given their places back


def test_an_address_where_nobody_listens_is_refused_at_once_not_after_minutes(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray tries for minutes"))
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"no Ray cluster at '{address}'.*ray start --head"):
            start(address, Needs(engines=1))


def test_the_store_has_room_for_three_copies_of_what_is_trained_and_not_of_embeddings(
    tmp_path, monkeypatch
):
    """At 7B the embeddings three times are 13 GB, for which a container's /dev/shm is refused."""
    pytest.importorskip("ray")
    from logra_lab.cluster import groups
    from logra_lab.rl.policies import load_policy

    class Asked(Exception):
        pass

    def asked(*_, store_bytes):
        raise Asked(store_bytes)

    monkeypatch.setattr(groups, "start", asked)
    config = make_config(policy="small", engine="hf", engines=1, trainers=1, journal_every=1)
    with pytest.raises(Asked) as caught, ExitStack() as stack:
        groups.make(config, None, tmp_path, stack)
    layers = load_policy("small").model.model.layers
    trained = sum(p.numel() for n, p in layers.named_parameters() if n.endswith("proj.weight"))
    assert caught.value.args == ((512 << 20) + 3 * 4 * trained,)


ATTACHED = """
    import sys
    from logra_lab.cluster.node import Needs, start

    class Actor:
        def answer(self):
            return 42

    if __name__ == "__main__":
        with start(sys.argv[1], Needs(engines=2)) as cluster:
            import ray
            actors = [ray.remote(Actor).options(**cluster.options(i)).remote() for i in range(2)]
            print(cluster.node_id, *ray.get([actor.answer.remote() for actor in actors]))
"""


@pytest.mark.slow
def test_another_driver_joins_a_cluster_by_its_address_and_leaves_it_up(ray_node, tmp_path):
    import ray

    script = tmp_path / "attached.py"
    script.write_text(textwrap.dedent(ATTACHED))
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(script), address]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.stdout.split() == [ray_node.node_id, "42", "42"], done.stderr
    assert "WARNING" not in done.stderr
    start(None, Needs(engines=4)).stop()  # it is up, and its places are free again


DRIVER = """
    import os, signal, sys
    from logra_lab.cluster.node import Needs, start

    class Sleeper:
        def pid(self):
            return os.getpid()

    if __name__ == "__main__":
        node = start(None, Needs(engines=2))
        import ray
        actors = [ray.remote(Sleeper).options(**node.options(i)).remote() for i in range(2)]
        pids = ray.get([actor.pid.remote() for actor in actors])
        os.kill(pids[1], signal.SIGSTOP)
        print(*pids, flush=True)
        if sys.argv[1] == "stop":
            node.stop()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_no_process_and_no_file_outlives_the_driver_not_even_a_stopped_actor(tmp_path, end):
    before = set(Path("/tmp").glob("logra_ray_*"))
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    driver = subprocess.Popen(
        [sys.executable, str(script), end], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2
    folders = set(Path("/tmp").glob("logra_ray_*")) - before
    try:
        code = driver.wait(60)
        assert code == (0 if end == "stop" else -signal.SIGKILL)
        deadline = time.monotonic() + 30  # the guardian's grace is 3 s
        while time.monotonic() < deadline and any(folder.exists() for folder in folders):
            time.sleep(0.1)
        assert not any(folder.exists() for folder in folders)
        assert not any(guardian.writers(folder) for folder in folders)
        assert not any(_runs(pid) for pid in pids)
    finally:
        for pid in filter(_runs, pids):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
