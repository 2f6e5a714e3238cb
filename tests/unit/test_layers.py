"""DESIGN section 2: imports point downward only."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hvdrecover

PACKAGE = Path(hvdrecover.__file__).parent
LAYERS = {
    "errors": 0,
    "error_kinds": 0,
    "events": 0,
    "config": 0,
    "heartbeat": 0,
    "machine": 0,
    "stand_in": 0,
    "texts": 0,
    "version": 0,
    "checkpoint": 1,
    "discovery": 1,
    "data": 1,
    "install": 1,
    "reporting": 1,
    "scalars": 2,
    "state": 2,
    "guard": 2,
    "virtual": 2,
    "torch": 3,
    "tensorflow": 3,
    "keras": 3,
    "launch": 4,
    "doctor": 4,
    "drill": 4,
    "cli": 5,
    "__main__": 5,
    "__init__": 5,
    "examples": 5,
}
# Within its layer, data stands above checkpoint: the version of data lists files of its storages;
# doctor and drill above launch, as they start ranks as jobs are started; keras above tensorflow, as it is
# another name for a part of that; and virtual above state, as virtual ranks replace a state's ranks.
# Parts of the state lie in scalars and guard, and use it; its list of hooks names them.
BESIDE = {
    ("guard", "state"),
    ("state", "guard"),
    ("data", "checkpoint"),
    ("doctor", "launch"),
    ("drill", "launch"),
    ("keras", "tensorflow"),
    ("scalars", "state"),
    ("state", "scalars"),
    ("virtual", "state"),
    ("virtual", "guard"),
}
FRAMEWORKS = {"torch", "tensorflow", "keras"}
ADAPTERS = {"torch", "tensorflow"}
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def topic(module):
    """The folder or top-level module that a file belongs to."""
    return module.split("/")[0].removesuffix(".py")


@functools.cache
def tree(module):
    return ast.parse((PACKAGE / module).read_text())


@functools.cache
def imports(module):
    """Absolute names of all that a module imports, also inside functions."""
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


@functools.cache
def topics_imported_by(module):
    """The topics of hvdrecover that a module imports."""
    topics = {topic(other) for other in MODULES}
    parts = (name.split(".") for name in imports(module) if name.startswith("hvdrecover."))
    return {part[1] for part in parts} & topics


def libraries_of(module):
    """The packages that a module imports something of."""
    return {name.split(".")[0] for name in imports(module)}


def test_every_module_has_a_layer():
    assert [module for module in MODULES if topic(module) not in LAYERS] == []


def test_imports_point_downward_only():
    wrong = []
    for module in MODULES:
        here = topic(module)
        for other in topics_imported_by(module) - {here}:
            beside = LAYERS[other] == LAYERS[here] and LAYERS[here] not in (0, 5)
            if LAYERS[other] > LAYERS[here] or (beside and (here, other) not in BESIDE):
                wrong.append((module, other))
    assert wrong == []


def test_the_files_of_the_state_import_each_other_in_no_circle_not_even_for_types():
    files = {
        f"hvdrecover.state.{Path(module).stem}": module for module in MODULES if topic(module) == "state"
    }
    graph = {name: set(imports(module)) & files.keys() for name, module in files.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(files)


def test_the_lowest_layer_imports_the_standard_library_only():
    known = {"hvdrecover", *sys.stdlib_module_names}
    lowest = [module for module in MODULES if LAYERS[topic(module)] == 0]
    assert [module for module in lowest if not libraries_of(module) <= known] == []


@pytest.mark.parametrize(
    ("names", "allowed", "bridges"),
    [
        (FRAMEWORKS, ADAPTERS | {"examples"}, []),
        ({"horovod"}, ADAPTERS | {"keras", "examples"}, ["state/horovod.py"]),
    ],
)
def test_only_adapters_and_examples_import_frameworks_and_horovod(names, allowed, bridges):
    using = [module for module in MODULES if names & libraries_of(module)]
    assert [module for module in using if topic(module) not in allowed] == bridges


def test_adapters_never_import_each_other_or_the_other_framework():
    for module in (module for module in MODULES if topic(module) in ADAPTERS):
        (other,) = ADAPTERS - {topic(module)}
        assert other not in topics_imported_by(module), module
        assert other not in libraries_of(module), module
        assert f"horovod.{other}" not in imports(module), module


def names_of_os_used(module):
    """Return what a module uses of ``os``, but for an environment handed on: ``{**os.environ, ...}``."""
    nodes = list(ast.walk(tree(module)))
    handed_on = {
        id(value)
        for node in nodes
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key is None
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and id(node) not in handed_on:
            yield node.attr
    yield from (name.removeprefix("os.") for name in imports(module) if name.startswith("os."))


def test_only_config_reads_environment_variables():
    readers = {"environ", "environb", "getenv", "getenvb"}
    reading = [
        module
        for module in MODULES
        if topic(module) not in ("install", "examples") and readers & set(names_of_os_used(module))
    ]
    assert reading == ["config.py", "launch/early/sitecustomize.py"]  # no process is to import config for it


def test_importing_the_package_imports_neither_a_framework_nor_horovod():
    program = (
        "import sys, hvdrecover, hvdrecover.state.run\n"
        "print(sorted({'torch', 'tensorflow', 'keras', 'horovod'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
