"""The rules of the house: who may import whom, where packages come from, what the README promises."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("forge", "replay", "weightsync", "actors", "apps")
MAY_IMPORT = {
    "forge": {"forge"},
    "replay": {"replay", "forge"},
    "weightsync": {"weightsync", "forge"},
    "actors": {"actors", "forge", "weightsync"},
    "apps": set(ROOMS),
    "requirements": set[str](),
    "tests": set(ROOMS),
}
# Tool calls are found by vLLM's parsers, without an engine; the last one is what our engine is measured against.
VLLM_FILES = {
    "actors/vllm_engine.py",
    "actors/vllm_adapters.py",
    "actors/vllm_extension.py",
    "actors/environments/tool_calls.py",
    "apps/bench/peers/vllm_bare.py",
}
LAUNCH_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
}
# Imported by benchmarks only, from a virtual environment of their own, or where a user has installed them.
PEERS = {"fastmcp", "mlflow", "openenv", "ray", "torchrl", "trl", "verifiers", "wandb"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


ROOM_FILES = python_files(*ROOMS, "requirements")
ALL_FILES = [*ROOM_FILES, *python_files("tests")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute module names and lines, lazy imports and `import_module("...")` included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), node.lineno


def offenders(paths: Iterable[Path], forbidden: str) -> list[str]:
    """`file:line` of every import of the package or module `forbidden`."""
    return [
        f"{name_of(path)}:{line}"
        for path in paths
        for module, line in imports(path)
        if f"{module}.".startswith(f"{forbidden}.")
    ]


def test_rooms_import_along_the_arrows_only() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in ALL_FILES
        for module, line in imports(path)
        if module.split(".")[0] in ROOMS and module.split(".")[0] not in MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    ]
    assert wrong == []


def test_only_the_engine_and_what_runs_in_its_worker_import_vllm() -> None:
    worker = ROOT / "weightsync" / "worker"
    others = [path for path in ROOM_FILES if name_of(path) not in VLLM_FILES and path.parent != worker]
    assert offenders(others, "vllm") == []


def test_nothing_imports_tests() -> None:
    """A dependency installs a top-level package of that name."""
    assert offenders(ALL_FILES, "tests") == []


def test_apps_import_their_siblings_by_full_name() -> None:
    """`import tasks` works in the controller, whose path starts with the app's folder, and nowhere else."""
    bare = [
        f"{name_of(path)}:{line} imports {module}"
        for path in python_files("apps")
        for module, line in imports(path)
        if module.split(".")[0] in {sibling.stem for sibling in path.parent.glob("*.py")} - {*ROOMS, "__init__"}
        and module.split(".")[0] not in sys.stdlib_module_names
    ]
    assert bare == []


def test_private_monarch_is_imported_with_a_reason_beside_it() -> None:
    bare = []
    for where in offenders(ALL_FILES, "monarch._src") + offenders(ALL_FILES, "monarch._rust_bindings"):
        path, line = where.split(":")
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        if not any("#" in text for text in lines[max(0, int(line) - 2) : int(line)]):
            bare.append(where)
    assert bare == []


def test_only_launch_reads_what_torchrun_sets() -> None:
    found = []
    for path in ROOM_FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                key: ast.expr | None = node.slice if ast.unparse(node.value).endswith("environ") else None
            elif isinstance(node, ast.Call) and re.search(r"(environ\.(get|pop)|getenv)$", ast.unparse(node.func)):
                key = node.args[0]
            else:
                continue
            if isinstance(key, ast.Constant) and key.value in LAUNCH_VARIABLES:
                found.append(name_of(path))
    assert set(found) <= {"forge/launch.py"}


def test_every_third_party_import_is_pinned_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    groups.append(project["tool"]["meshforge"]["without-dependencies"])
    pinned = {canonicalize_name(Requirement(line).name) for group in groups for line in group}
    owners = importlib.metadata.packages_distributions()
    shared = project["tool"]["pytest"]["ini_options"]["pythonpath"]
    in_tests = {file.stem for folder in shared for file in (ROOT / folder).glob("*.py")}
    local = {*ROOMS, *PEERS, *in_tests, *sys.stdlib_module_names}
    missing = [
        f"{name_of(path)}:{line} imports {module}"
        for path in ALL_FILES
        for module, line in imports(path)
        if (top := module.split(".")[0]) not in local | {sibling.stem for sibling in path.parent.glob("*.py")}
        and not pinned & {canonicalize_name(owner) for owner in owners.get(top, [top])}
    ]
    assert missing == []


def test_modules_come_from_this_checkout_in_a_process_started_elsewhere(tmp_path: Path) -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files(*ROOMS)]
    script = (
        "import importlib.util as u, sys\nfor m in sys.argv[1:]: print(u.find_spec(m.removesuffix('.__init__')).origin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *modules], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(path) for path in python_files(*ROOMS)]


def test_every_folder_of_a_room_is_a_package_and_no_folder_of_tests_is() -> None:
    """A namespace package would yield to any installed package of the same name."""
    folders = {path.parent for path in python_files(*ROOMS)}
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    mirrored = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert [str(folder) for folder in mirrored if not (ROOT / folder / "__init__.py").exists()] == []


def test_no_room_has_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [name_of(path) for path in ALL_FILES if path.stem in drawers] == []


def test_no_file_depends_on_what_lies_outside_the_checkout() -> None:
    outside = ("../" + "shared", "/work" + "/", "/tmp" + "/lab", "/opt" + "/pypi", "/opt" + "/wheels")
    kinds = {".py", ".yaml", ".toml", ".lock", ".md", ".json", ""}
    found = [
        f"{name_of(path)} mentions {text}"
        for folder in (*ROOMS, "tests", "requirements", ".ci")
        for path in [*(ROOT / folder).rglob("*"), *ROOT.glob("*.*"), ROOT / "Makefile"]
        if path.is_file() and path.suffix in kinds
        for text in outside
        if text in path.read_text(encoding="utf-8")
    ]
    assert sorted(set(found)) == []


def test_every_field_of_a_config_has_a_docstring() -> None:
    bare = []
    for path in python_files(*ROOMS):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    if isinstance(field, ast.AnnAssign) and not documented:
                        bare.append(f"{name_of(path)}:{field.lineno} {node.name}.{ast.unparse(field.target)}")
    assert bare == []


# --- the README


def code_blocks(markdown: str) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)


def files_of_tree(block: str) -> dict[str, str]:
    """Path to description, from lines `  name.py other.py   what they hold` indented below `folder/`.

    Names end at the first run of two spaces, a folder's name ends in a slash.
    """
    files: dict[str, str] = {}
    open_folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        names, _, description = line.strip().partition("  ")
        while open_folders and open_folders[-1][0] >= indent:
            open_folders.pop()
        prefix = "".join(name for _, name in open_folders)
        for name in names.split():
            if name.endswith("/"):
                open_folders.append((indent, name))
            else:
                files[prefix + name] = description.strip()
    return files


def source_files() -> set[str]:
    listed = {".py", ".yaml", ".md", ".lock"}
    found = {p for room in (*ROOMS, "requirements") for p in (ROOT / room).rglob("*") if p.suffix in listed}
    return {name_of(path) for path in found if path.name != "__init__.py"}


def test_the_tree_reader_reads_a_tree() -> None:
    block = "a/       first\n  b.py c.py   two\n  d/\n    e.yaml      preset\n  f.md   last\ng.toml   root\n"
    want = {"a/b.py": "two", "a/c.py": "two", "a/d/e.yaml": "preset", "a/f.md": "last", "g.toml": "root"}
    assert files_of_tree(block) == want


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_file_tree_of_the_readme_lists_every_source_file_and_no_other(readme: str) -> None:
    (block,) = (block for block in code_blocks(readme) if re.search(r"^forge/", block, flags=re.MULTILINE))
    files = files_of_tree(block)
    in_rooms = {path for path in files if path.split("/")[0] in (*ROOMS, "requirements")}
    assert source_files() - in_rooms == set(), "not in the README's tree"
    assert in_rooms - source_files() == set(), "in the README's tree, but not on disk"
    assert [path for path in files if not (ROOT / path).exists()] == []
    assert [path for path, description in files.items() if not description] == []


def test_the_commands_of_the_readme_exist(readme: str) -> None:
    code = "\n".join([*code_blocks(readme), *re.findall(r"`([^`\n]+)`", readme)])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z]+)", code))
    assert {"run", "test", "setup", "help"} <= used
    assert used <= targets
    modules = re.findall(r"-m (apps[\w.]+)", code)
    paths = [module.replace(".", "/") for module in modules]
    paths = [f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py" for path in paths]
    paths += re.findall(r"(?<!tests/)\b((?:forge|actors|replay|weightsync|apps)/[\w/]+\.(?:py|yaml))", code)
    paths += re.findall(r"\btests/[\w/]+\.py", code)
    assert modules
    assert [path for path in paths if not (ROOT / path).exists()] == []
