"""Does the code keep the law of its rooms: who imports whom, who knows torch, what files are called and how long?"""

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "triax"

# The import law. Besides these every room may import itself and the foundation.
FOUNDATION = {"errors", "units"}
EVERYWHERE = FOUNDATION | {"spec"}
LAW: dict[str, set[str]] = {
    "spec": set(),
    "plan": set(),
    "nn": set(),
    "data": set(),
    "checkpoint": set(),
    "watch": set(),
    "report": set(),
    "launch": set(),
    "parallel": {"nn"},
    "train": {"nn", "parallel", "data", "checkpoint", "watch"},
    "generate": {"nn", "parallel", "data", "checkpoint"},
    "verify": {"plan", "nn", "parallel", "data", "checkpoint", "train", "watch"},
}
NO_TORCH = ("errors", "units", "spec", "plan")
# The entry may import every room, but not while it is itself imported: `triax --help` waits for no torch.
ENTRY = ("cli", "__main__")

# Words for files whose name does not say what is inside.
WORDLESS = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "registry", "misc", "tools"}
# They run code that a file or a peer brings along.
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save"}
FORBIDDEN_SWITCHES = {"allow_pickle", "trust_remote_code"}
MAX_LINES = 400


def modules() -> list[Path]:
    """The Python files of triax, as they are on disk now."""
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room(path: Path) -> str:
    """The room a file is in; for ``triax/cli.py`` and its like the name of the file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything these nodes import; under TYPE_CHECKING counts too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute of attributes of a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def runs_on_import(source: ast.AST) -> Iterator[ast.AST]:
    """Every node of a module outside its functions and outside what only a type checker reads."""
    for node in ast.iter_child_nodes(source):
        is_for_types = isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"
        if not is_for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from runs_on_import(node)


def unlawful_imports(source: ast.AST, of_room: str) -> Iterator[str]:
    if of_room in ENTRY:
        allowed = set(EVERYWHERE | set(ENTRY))
        nodes = runs_on_import(source)
    else:
        allowed = FOUNDATION if of_room in FOUNDATION else LAW.get(of_room, set()) | EVERYWHERE | {of_room}
        nodes = ast.walk(source)
    for line, name in imports(nodes):
        package, _, inside = name.partition(".")
        if name.startswith("."):
            yield f"{line}: relative import of {name}: write it in full, so that the law reads off the page"
        elif package == "triax" and inside != "__version__" and inside.split(".")[0] not in allowed:
            yield f"{line}: {of_room} imports {name} here, and may import only {', '.join(sorted(allowed))}"
        elif package == "torch" and of_room in (*NO_TORCH, *ENTRY):
            yield f"{line}: {of_room} imports {name}, and must start without torch"
        elif of_room == "nn" and within(name, "torch.distributed"):
            yield f"{line}: nn imports {name}, and is the network on one device"


def unsafe_code(source: ast.AST) -> Iterator[str]:
    for line, name in imports(ast.walk(source)):
        if name.split(".")[0] in FORBIDDEN_IMPORTS or any(within(name, call) for call in FORBIDDEN_CALLS):
            yield f"{line}: {name} runs code that a file brings along"
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            yield f"{node.lineno}: {dotted(node.func)} runs code that a file brings along"
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN_SWITCHES and ast.unparse(node.value) != "False":
            yield f"{node.value.lineno}: {node.arg} runs code that a file brings along"


def distributed_names(source: ast.AST) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
            yield f"{node.lineno}: torch.distributed in nn, which is the network on one device"


def mutable_globals(source: ast.Module) -> Iterator[str]:
    """Lists, dicts and sets of a module that nothing declares Final, and functions that rebind a module's name."""
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp):
            names = [dotted(target) for target in node.targets]
            if names != ["__all__"]:
                yield f"{node.lineno}: {', '.join(names)} can be changed by anyone: declare it Final, or use a tuple"
    for inner in ast.walk(source):
        if isinstance(inner, ast.Global):
            yield f"{inner.lineno}: global {', '.join(inner.names)}: state lives in values, not in modules"


def found(check: Callable[[Path], Iterator[str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{what}" for path in modules() for what in check(path)]


def test_every_room_is_in_the_law() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms <= LAW.keys() | set(ENTRY), "a new room needs its line in the law, here and in pyproject.toml"


def test_imports_keep_the_law() -> None:
    assert found(lambda path: unlawful_imports(tree(path), room(path))) == []


def test_nn_knows_no_torch_distributed() -> None:
    assert found(lambda path: distributed_names(tree(path)) if room(path) == "nn" else iter(())) == []


def test_nothing_runs_code_from_a_file() -> None:
    assert found(lambda path: unsafe_code(tree(path))) == []


def test_no_mutable_globals() -> None:
    assert found(lambda path: mutable_globals(tree(path))) == []


def test_names_say_what_is_inside() -> None:
    parts = {(path, part) for path in modules() for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert [str(path) for path, part in sorted(parts) if WORDLESS & set(part.split("_"))] == []


def test_files_stay_short() -> None:
    lines = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {str(path): n for path, n in lines.items() if n > MAX_LINES} == {}


def test_import_linter_holds_the_same_law() -> None:
    """pyproject.toml's contracts, read as what they leave allowed, are LAW; so `make check` and this file agree."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]

    def names(modules: list[str]) -> set[str]:
        return {module.removesuffix(".**").removeprefix("triax.") for module in modules}

    forbidden: dict[str, set[str]] = {of_room: set() for of_room in LAW.keys() | FOUNDATION}
    for contract in config["contracts"]:
        for source in names(contract["source_modules"]):
            forbidden[source] |= names(contract["forbidden_modules"]) - {source}
    for of_room, allowed in LAW.items():
        assert LAW.keys() - forbidden[of_room] - {of_room, "spec"} == allowed, of_room
        assert ("torch" in forbidden[of_room]) == (of_room in NO_TORCH), of_room
    assert all(forbidden[name] == LAW.keys() | {"torch"} for name in FOUNDATION)


def test_commands_start_without_torch() -> None:
    """A fresh interpreter that imports the entry and all of spec and plan does not load torch, by any way round."""
    light = [path for path in modules() if room(path) in (*NO_TORCH, "cli")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in light]
    code = f"import {', '.join(names)}, sys; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "")


@pytest.mark.parametrize(
    ("of_room", "line"),
    [
        ("spec", "import torch"),
        ("spec", "from triax.nn import decoder"),
        ("units", "from triax.spec import layout"),
        ("plan", "def f():\n    from torch import nn"),
        ("plan", "from triax import train"),
        ("nn", "from torch import distributed"),
        ("nn", "import torch.distributed.tensor"),
        ("data", "import triax.watch.metrics"),
        ("parallel", "from triax.data.source import Source"),
        ("train", "from triax.plan.memory import peak_bytes"),
        ("launch", "from ..train import loop"),
        ("cli", "from triax.train.loop import train"),
        ("cli", "import torch"),
    ],
)
def test_the_law_sees_a_breach(of_room: str, line: str) -> None:
    assert len(list(unlawful_imports(ast.parse(line), of_room))) == 1


@pytest.mark.parametrize(
    ("of_room", "line"),
    [
        ("spec", "from triax.errors import BadInput"),
        ("nn", "import torch"),
        ("train", "from triax.parallel.place import place"),
        ("verify", "from triax.plan.memory import peak_bytes"),
        ("cli", "def train():\n    from triax.train.loop import train"),
        ("cli", "from triax import __version__"),
    ],
)
def test_the_law_lets_through_what_it_allows(of_room: str, line: str) -> None:
    assert list(unlawful_imports(ast.parse(line), of_room)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "state = torch.load(path)",
        "value = eval(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unsafe_code_is_seen(line: str) -> None:
    assert len(list(unsafe_code(ast.parse(line)))) == 1


def test_evaluation_mode_is_not_eval() -> None:
    assert list(unsafe_code(ast.parse("model.eval(); np.load(path, allow_pickle=False)"))) == []


@pytest.mark.parametrize("line", ["cache = {}", "seen = [1]", "def f():\n    global seen\n    seen = 1"])
def test_mutable_globals_are_seen(line: str) -> None:
    assert len(list(mutable_globals(ast.parse(line)))) == 1
