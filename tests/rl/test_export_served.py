"""An exported run, loaded by vLLM's own OpenAI server: a stock process that knows nothing of us."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers as hf

from logra_lab.cli import main
from logra_lab.rl.loop import train
from logra_lab.rl.policies import load_policy

HERE = Path(__file__).parent
tiny_config = runpy.run_path(str(HERE / "training.py"))["tiny_config"]
pytestmark = [
    runpy.run_path(str(HERE.parent / "vllm_support.py"))["needs_vllm"],
    pytest.mark.slow,
]
SECONDS = 240  # 30 to start, when nothing else runs


def serve(folder, port, log):
    """The server of `vllm serve`; that command itself asks for a distribution named vllm, which the
    CPU build is not."""
    module = "vllm.entrypoints.openai.api_server"
    options = {"--host": "127.0.0.1", "--port": str(port), "--model": str(folder)}
    options |= {"--dtype": "float32", "--max-model-len": "64", "--served-model-name": "exported"}
    given = [word for pair in options.items() for word in pair]
    own = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", module, "--enforce-eager", *given],
        env=os.environ | own | {"HF_HUB_OFFLINE": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def ask(port, path, content=None):
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


@pytest.fixture
def exported(tmp_path):
    """A folder that `logra-lab export` wrote; a learning rate that moves the policy at once."""
    config = tiny_config(method="adam", learning_rate=1e-3, steps=2)
    train(config, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_vllms_own_server_answers_with_the_trained_policys_probabilities(exported, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(tmp_path / "server.log", "wb") as log:
        server = serve(exported, port, log)
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                ask(port, "health")
                break
            except OSError:
                printed = (tmp_path / "server.log").read_text()[-2000:]
                assert server.poll() is None, printed
                assert time.monotonic() < deadline, printed
                time.sleep(0.5)
        prompt = load_policy(str(exported)).encode("12+34=")
        wish = {"model": "exported", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        wish |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        choice = json.loads(ask(port, "v1/completions", wish))["choices"][0]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    said = choice["token_ids"]
    assert len(said) == 6
    ids = torch.tensor([prompt + said])

    def logps(model):
        with torch.no_grad():
            at = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return at.gather(1, torch.tensor(said)[:, None])[:, 0]

    served = torch.tensor(choice["logprobs"]["token_logprobs"])
    trained = logps(hf.AutoModelForCausalLM.from_pretrained(exported))
    torch.testing.assert_close(served, trained, atol=1e-4, rtol=0)  # two engines' float32
    assert (served - logps(load_policy("small").model)).abs().max() > 1e-2
