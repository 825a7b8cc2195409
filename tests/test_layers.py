"""The layers of the package: imports point down only, and each layer imports where its users run.

cli > train, schedule, observe > models, rollout > parallel, transport > algo, data, convert > config
    > records, checkpoints > errors
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_sao"
LAYERS = [  # from the ground up; neighbours never import each other
    ("errors",),
    ("records", "checkpoints"),
    ("config",),
    ("algo", "data", "convert"),
    ("parallel", "transport"),
    ("models", "rollout"),
    ("train", "schedule", "observe"),
    ("cli",),
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
PROCESS_GROUPS = ("torch.distributed", "megatron.core.parallel_state")
CHECKPOINTS = "torch.distributed.checkpoint"  # reads and writes files
VLLM = {"rollout/vllm_server.py", "transport/vllm_plugin.py"}  # the server, and what runs inside it


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """The folder below the package, or the module's own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, wherever it stands: "from a import b" gives "a.b"."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_every_part_has_its_layer():
    assert {part_of(path) for path in sources()} == set(HEIGHT)


def test_imports_point_down_only():
    faults = []
    for path in sources():
        for line, name in imports(path):
            package, _, rest = name.partition(".")
            part = rest.split(".")[0]
            if package == "megatron_sao" and part in HEIGHT and part != part_of(path):
                if HEIGHT[part] >= HEIGHT[part_of(path)]:
                    faults.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert faults == []


def test_process_groups_are_touched_in_parallel_alone_and_by_the_weight_group():
    """`transport/group.py` makes a group of its own, of trainers and engines, beside those of the trainer's world."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        for _, name in imports(path)
        if name.startswith(PROCESS_GROUPS) and not name.startswith(CHECKPOINTS) and part_of(path) != "parallel"
    }
    assert users == {"transport/group.py"}


def test_only_what_runs_in_the_server_imports_vllm():
    users = {str(path.relative_to(PACKAGE)) for path in sources() for _, name in imports(path) if name[:5] == "vllm."}
    assert users == VLLM


WITHOUT = """
import importlib, sys
absent, modules = sys.argv[1].split(","), sys.argv[2:]

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ImportError(f"{name} is absent here")

sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""


@pytest.mark.parametrize(
    ("parts", "absent"),
    [
        (("config", "convert", "rollout", "schedule", "observe", "cli"), "torch,megatron,vllm,transformers"),
        (("algo", "data", "transport"), "megatron,vllm"),
    ],
    ids=["without torch", "without Megatron"],
)
def test_imports_where_others_are_absent(parts, absent):
    modules = [
        ".".join(["megatron_sao", *path.relative_to(PACKAGE).with_suffix("").parts])
        for path in sources()
        if part_of(path) in parts and str(path.relative_to(PACKAGE)) not in VLLM
    ]
    assert len(modules) > len(parts)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *modules],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
