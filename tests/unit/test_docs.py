"""What the site and README say is so: names, programs, messages, figures, files for launchers."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
NAMES = (Path(__file__).parent / "public_names.txt").read_text().splitlines()
# the page of each public module, and the program that uses those of its names whose docstrings have no example
PAGES = {
    "hvd_compress.torch": ("torch.md", "torch_names.py"),
    "hvd_compress.ddp": ("ddp.md", "ddp_names.py"),
    "hvd_compress.tensorflow": ("tensorflow.md", "tensorflow_names.py"),
    "hvd_compress.tensorflow.keras": ("keras.md", "keras_names.py"),
    "hvd_compress.tensorflow.keras.callbacks": ("keras.md", "keras_names.py"),
    "hvd_compress.tensorflow.keras.elastic": ("keras.md", "keras_names.py"),
    "hvd_compress.keras": ("keras.md", "keras_names.py"),
    "hvd_compress.keras.callbacks": ("keras.md", "keras_names.py"),
    "hvd_compress.keras.elastic": ("keras.md", "keras_names.py"),
}
FIGURE = re.compile(r"(?<![\w.])-?\d[\d.]* \(-?[\d.]+–-?[\d.]+\)")


def names_of(module: str) -> list[str]:
    return [name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == module]


def documented(page: str) -> set[str]:
    """The names that a page of the reference describes, by autodoc or in words."""
    text = (DOCS / "reference" / page).read_text()
    described = set(re.findall(r"auto(?:class|function|exception):: (?:[\w.]*\.)?(\w+)", text))
    return described | set(re.findall(r"`(\w+)`", text))


def used(program: str) -> set[str]:
    tree = ast.parse((EXAMPLES / "reference" / program).read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("module", PAGES)
def test_every_name_of_an_edge_has_a_page_and_an_example(module: str) -> None:
    page, program = PAGES[module]
    names = set(names_of(module))
    assert names
    assert not names - documented(page), "these names are on no page of the reference"
    assert not names - used(program), f"no part of examples/reference/{program} uses these names"


def test_every_name_of_the_core_has_a_page_and_an_example() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    described = set(re.findall(r"auto(?:class|function|exception):: (?:[\w.]*\.)?(\w+)", text))
    for module in ("hvd_compress", "hvd_compress.testing"):
        for name in names_of(module):
            value = getattr(importlib.import_module(module), name)
            assert name in described or inspect.ismodule(value), f"{name} is on no page of the reference"
            assert ">>>" in (value.__doc__ or ""), f"{name} has no example"
    errors = set(names_of("hvd_compress.errors"))
    assert errors <= described


def test_every_other_name_is_on_the_page_of_inner_modules() -> None:
    listed = {f"{module.name}.{name}" for module in of_the_site("inside").inner_modules() for name in module.names}
    elsewhere = ("hvd_compress", *PAGES)
    assert not [name for name in NAMES if name not in listed and name.rpartition(".")[0] not in elsewhere]


def test_names_below_the_edges_that_users_need_have_an_example() -> None:
    page = (DOCS / "reference" / "inside.md").read_text()
    needed = page.partition("## What users need of them")[2]
    shown = re.findall(r"currentmodule:: (\S+)|(?:autoclass|autofunction|py:data):: (\w+)", needed)
    programs = "\n".join(file.read_text() for file in EXAMPLES.rglob("*.py"))
    module = ""
    for of, name in shown:
        module = of or module
        if name:
            assert re.search(rf"from {module} import .*\b{name}\b", programs), f"no program uses {module}.{name}"
    for name in ("check_state", "write_state", "redistribute"):
        assert ">>>" in getattr(importlib.import_module("hvd_compress.feedback"), name).__doc__


def test_every_part_of_a_program_is_shown() -> None:
    for page, program in set(PAGES.values()):
        tree = ast.parse((EXAMPLES / "reference" / program).read_text())
        parts = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        shown = set(re.findall(r":pyobject: (\w+)", (DOCS / "reference" / page).read_text()))
        assert parts - shown <= {"main", "train", "model", "fit", "data"}, program


def included() -> dict[Path, list[Path]]:
    """The files of the examples that each page shows."""
    found = {}
    for page in DOCS.rglob("*.md"):
        places = re.findall(r"\{literalinclude\} (\S+)", page.read_text())
        found[page] = [(page.parent / place).resolve() for place in places]
    return found


def test_every_guide_shows_a_program_and_every_program_is_shown() -> None:
    shown = included()
    pages = [*(DOCS / "guides").glob("*.md"), *(DOCS / "start").glob("*.md")]
    # a program may also stand in the page: test_guides.py runs it
    pages = [page for page in pages if "```python\nimport " not in page.read_text()]
    without = {page.name for page in pages if not shown[page]} - {"index.md", "install.md"}
    assert not without, "these guides show no program"
    files = {file for of_page in shown.values() for file in of_page}
    assert not [file for file in files if not file.is_file()]
    programs = {f for folder in ("guides", "start", "launch") for f in (EXAMPLES / folder).iterdir() if f.is_file()}
    assert programs <= files, "no page shows these programs"


def of_the_site(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_site", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r":class: message\n\n?(.*?)\n```", text, re.S)
    assert len(messages) > 30
    known = "\n".join(of_the_site("messages").strings())
    assert not [message for message in messages if " ".join(message.split()) not in known]


def test_all_messages_are_collected() -> None:
    found = of_the_site("messages").messages()
    assert {"GradientError", "MismatchError", "StateError", "UnsupportedError", "WireError"} <= found.keys()
    assert sum(map(len, found.values())) > 300
    assert any(text.startswith("min_numel={…}: must be a number of elements") for text in found["ValueError"])
    # put together by a function, and by way of a name
    assert "Horovod is not installed in this Python. Build and install it for your {…}: {…}" in found["MissingError"]
    assert any("are not at the same point of their programs" in text for text in found["MismatchError"])
    assert any("compressed in host memory" in text for text in found["UserWarning"])


def test_every_warning_is_explained_on_the_troubleshooting_page() -> None:
    text = (DOCS / "troubleshooting.md").read_text().partition("### Warnings")[2]
    explained = [" ".join(m.split()) for m in re.findall(r":class: message\n\n?(.*?)\n```", text, re.S)]
    found = of_the_site("messages").messages()
    warned = [text for kind, texts in found.items() if kind.endswith("Warning") for text in texts]
    assert len(warned) > 9
    assert not [text for text in warned if not any(part in text for part in explained)]


def test_every_kind_of_error_is_on_the_troubleshooting_page() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    assert not [name for name in names_of("hvd_compress.errors") if name not in text and name != "HvdCompressError"]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/guides/adam.md",
        "docs/guides/choose.md",
        "docs/guides/slow-links.md",
        "docs/results/index.md",
    ],
)
def test_figures_with_a_spread_are_measured_ones(page: str) -> None:
    """Every `median (low–high)` stands in a page that is made of records."""
    pages = (ROOT / "benchmarks" / "results" / "README.md", DOCS / "reproductions.md")
    measured = set(FIGURE.findall("\n".join(page.read_text() for page in pages)))
    said = FIGURE.findall((ROOT / page).read_text())
    assert said
    assert not set(said) - measured


def test_the_readme_is_short_and_its_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    said = {command for page in pages for command in re.findall(r"(?:`|^)make ([a-z0-9-]+)", page.read_text(), re.M)}
    assert {"demo", "test", "docs"} <= said
    assert said <= targets


@pytest.mark.parametrize("page", sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")))
def test_links_of_the_site_lead_to_files(page: str) -> None:
    places = re.findall(r"\]\(([^)\s]+)\)", (DOCS / page).read_text())
    files = [place.partition("#")[0] for place in places if not re.match(r"[a-z]+:|#|<", place)]
    assert not [file for file in files if not ((DOCS / page).parent / file).is_file()]


def test_what_the_image_is_made_of_is_there() -> None:
    text = (EXAMPLES / "launch" / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()]
    assert copied
    assert not [name for name in copied if not (ROOT / name).exists()]
    pins = "\n".join(file.read_text() for file in (ROOT / "ci").glob("requirements*.txt"))
    assert not [pin for pin in re.findall(r"\w+==[\d.]+", text) if pin not in pins]
    assert {"gcc", "g++", "make"} <= set(text.split()), "what build-horovod needs"


@pytest.mark.thorough
def test_the_image_can_be_built() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=60).returncode:
        pytest.skip("no Docker daemon here: its parts are checked by the test above")
    build = [docker, "build", "-f", "examples/launch/Dockerfile", "-t", "hvd-compress-test", "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=1800)
    start = ["horovodrun", "-np", "2", "--gloo", "python", "examples/start/pytorch.py"]
    said = subprocess.run([docker, "run", "--rm", "hvd-compress-test", *start], capture_output=True, timeout=200)
    assert b"times fewer bytes" in said.stdout


def test_files_for_slurm_and_kubernetes_are_well_formed() -> None:
    import yaml

    slurm = EXAMPLES / "launch" / "train.slurm"
    assert subprocess.run(["bash", "-n", str(slurm)], capture_output=True).returncode == 0
    job = yaml.safe_load((EXAMPLES / "launch" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    ranks = int(launcher["args"][launcher["args"].index("-np") + 1])
    assert ranks == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    for said in (slurm.read_text(), " ".join(launcher["args"])):
        (program,) = set(re.findall(r"python (examples/\S+)", said))
        assert (ROOT / program).is_file()


def test_links_to_files_become_links_of_the_site() -> None:
    links = of_the_site("links")
    page = links.page_text("guides/x", "[A](../../ARCHITECTURE.md#rooms) [c](../conf.py) ![p](../a.png)\n")
    assert page == "[A](../how/architecture.md#rooms) c (`docs/conf.py`) ![p](../a.png)\n"
    assert "](../decisions/README.md)" in links.page_text("how/architecture", "")
    fence = "```text\n[A](../../ARCHITECTURE.md)\n```\n"
    assert links.page_text("guides/x", fence) == fence
