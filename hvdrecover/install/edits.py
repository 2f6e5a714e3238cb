"""The changes to Horovod's source that make it build and behave, each with its name and its reason.

An edit replaces one text by another. It must find its text exactly once: a Horovod source in which it doesn't
is not the one that the edit was written for, and is left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import EditError


@dataclass(frozen=True)
class Edit:
    """One named replacement in one file of Horovod's source.

    Attributes:
        name: how messages call it.
        file: the file, relative to the root of the source tree.
        old: the text to replace; it must occur exactly once.
        new: what takes its place.
        why: what goes wrong without it.
        until: if given, all that comes before the next occurrence of this text is replaced as well.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    until: str = ""


_REGISTRY = (
    "a worker that is restarted while it waits for the others counts twice, or another is left at a barrier "
    "to which nobody else comes: then ranks wait for each other for ever"
)
_ORDER = "of the hosts that are discovered at once, chance decides which are used and which are spare"
_SLOW_START = "horovodrun imports TensorFlow, just to learn whether Gloo is built in: seconds at each start"
_STALLS = "which tensors wait for which ranks is printed by rank 0, and known to nobody else"
_CPP20 = "the headers of current PyTorch and TensorFlow need C++20"

_REGISTRY_CODE = """\
        key = (host, slot)
        with self._lock:
            self._lock.wait_for(lambda: not self._acting)
            if self._driver.finished():
                return self._rendezvous_id
            if key not in self._states or state == FAILURE:
                logging.info('record state: {}[{}] = {}'.format(host, slot, state))
                self._states[key] = state
                self._workers[state].add(key)
            elif state != self._states[key]:
                logging.error('key exists and new state %s not FAILURE, '
                              'ignoring (current state is %s)', state, self._states[key])

            rendezvous_id = self._rendezvous_id
            # Who has waited for an answer for this slot before is gone.
            mine = self._waiting[key] = object()
            self._lock.notify_all()
            self._acting = len(self._states) >= self._size
            if not self._acting:
                self._lock.wait_for(lambda: self._waiting.get(key) is not mine)
                return rendezvous_id
        try:
            self._on_workers_recorded()
        finally:
            with self._lock:
                self._acting = False
                self._waiting.clear()
                self._lock.notify_all()
        return rendezvous_id

"""

EDITS: tuple[Edit, ...] = (
    Edit(
        name="c++20",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        why=_CPP20,
    ),
    Edit(
        name="c++20-torch",
        file="horovod/torch/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        why=_CPP20,
    ),
    Edit(
        name="c++20-tensorflow",
        file="horovod/tensorflow/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 17)",
        new="set(CMAKE_CXX_STANDARD 20)",
        why=_CPP20,
    ),
    Edit(
        name="relative-rpath",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
        new=(
            "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
            "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
            "set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)\n"
            'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../torch/lib;$ORIGIN/../../tensorflow;'
            '$ORIGIN/../../tensorflow/python;$ORIGIN/../../../..")\n'
        ),
        why=(
            "a wheel must find the frameworks and libmpi of the environment that it is installed in, "
            "not of the one that it was built in; a site's own MPI, CUDA and NCCL come after these"
        ),
    ),
    Edit(
        name="no-xla-ops",
        file="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        why="it includes an XLA header that TensorFlow no longer ships",
    ),
    Edit(
        name="stall-inspector",
        file="horovod/common/gloo/gloo_controller.cc",
        old="global_ranks_.reserve(size_)",
        new="global_ranks_.resize(size_)",
        why="the vector stays empty under Gloo, and so the stall inspector never fires",
    ),
    Edit(
        name="gloo-iface",
        file="horovod/common/gloo/gloo_context.cc",
        old=(
            "  device_attr.iface = gloo_iface_;\n"
            "  device_attr.ai_family = AF_UNSPEC;\n"
            "  auto dev = CreateDevice(device_attr);\n"
            "\n"
            "  global_ctx"
        ),
        new=(
            "  gloo_iface_ = global_context.gloo_iface_;\n"
            "  device_attr.iface = gloo_iface_;\n"
            "  device_attr.ai_family = AF_UNSPEC;\n"
            "  auto dev = CreateDevice(device_attr);\n"
            "\n"
            "  global_ctx"
        ),
        why="process sets ignore HOROVOD_GLOO_IFACE, and hosts whose name means 127.0.0.1 can't connect",
    ),
    Edit(
        name="process-set-finalize",
        file="horovod/common/gloo/gloo_context.cc",
        old="  global_ctx = global_context.ctx;\n  timeout_ = global_context.timeout_;\n",
        new=(
            "  enabled_ = true;\n  global_ctx = global_context.ctx;\n  timeout_ = global_context.timeout_;\n"
        ),
        why="after hvd.shutdown() the sockets and two threads that wake every 10 ms would stay",
    ),
    Edit(
        name="first-meeting",
        file="horovod/common/gloo/gloo_context.cc",
        old=(
            "  ctx = Rendezvous(HOROVOD_GLOO_GLOBAL_PREFIX,\n"
            "                   rendezvous_addr_env, rendezvous_port,\n"
            "                   rank, size, dev, timeout_);\n"
        ),
        new=(
            "  auto patience = reset_ ? timeout_\n"
            "                         : std::max<std::chrono::milliseconds>(\n"
            "                               timeout_, std::chrono::seconds(60));\n"
            "  ctx = Rendezvous(HOROVOD_GLOO_GLOBAL_PREFIX,\n"
            "                   rendezvous_addr_env, rendezvous_port,\n"
            "                   rank, size, dev, patience);\n"
            "  ctx->setTimeout(timeout_);\n"
        ),
        why="processes start at different speeds, which a timeout that is short for lost hosts must allow",
    ),
    Edit(
        name="connect-timeout",
        file="third_party/gloo/gloo/transport/tcp/pair.h",
        old="        timeout_ * 5,\n",
        new="        timeout_,\n",
        why="ranks wait five times HOROVOD_GLOO_TIMEOUT_SECONDS for one that is lost while they connect",
    ),
    Edit(
        name="init-failure",
        file="horovod/common/operations.cc",
        old=(
            "    global_gloo_context.Initialize(ParseGlooIface());\n"
            "  }\n"
            "  if (state.control_operation == LibType::GLOO) {\n"
            "    // Initializes global controller\n"
            "    state.process_set_table.Initialize(global_gloo_context);\n"
            "  }\n"
        ),
        new=(
            "    try {\n"
            "      global_gloo_context.Initialize(ParseGlooIface());\n"
            "      if (state.control_operation == LibType::GLOO) {\n"
            "        // Initializes global controller\n"
            "        state.process_set_table.Initialize(global_gloo_context);\n"
            "      }\n"
            "    } catch (const std::exception& ex) {\n"
            "      InitializationError() = ex.what();\n"
            "      global_gloo_context.Finalize();\n"
            "      state.initialization_failed = true;\n"
            "      return;\n"
            "    }\n"
            "  }\n"
            "#if HAVE_MPI\n"
            "  if (global_mpi_context.IsEnabled() &&\n"
            "      state.control_operation == LibType::GLOO) {\n"
            "    state.process_set_table.Initialize(global_gloo_context);\n"
            "  }\n"
            "#endif // HAVE_MPI\n"
        ),
        why="a rank that is lost while all connect aborts the others, and what they have in memory is gone",
    ),
    Edit(
        name="init-failure-text",
        file="horovod/common/operations.cc",
        old="void BackgroundThreadLoop(HorovodGlobalState& state) {\n",
        new=(
            "// Why the last initialization failed.\n"
            "static std::string& InitializationError() {\n"
            "  static std::string text;\n"
            "  return text;\n"
            "}\n"
            "\n"
            "void BackgroundThreadLoop(HorovodGlobalState& state) {\n"
        ),
        why="who calls hvd.init() has to tell a lost rank from having been removed from the job",
    ),
    Edit(
        name="init-again",
        file="horovod/common/operations.cc",
        old="    // Reset initialization flag\n    horovod_global.initialization_done = false;\n",
        new=(
            "    // Reset initialization flags\n"
            "    horovod_global.initialization_done = false;\n"
            "    horovod_global.initialization_failed = false;\n"
        ),
        why="after one failed initialization all later ones would count as failed",
    ),
    Edit(
        name="recovery-functions",
        file="horovod/common/operations.cc",
        old="int horovod_is_initialized() {\n",
        new=(
            "const char* horovod_initialization_error() {\n"
            "  return InitializationError().c_str();\n"
            "}\n"
            "\n"
            "void horovod_set_stall_shutdown_seconds(int seconds) {\n"
            "  std::lock_guard<std::recursive_mutex> table_lock(\n"
            "      horovod_global.process_set_table.mutex);\n"
            "  if (horovod_global.initialization_done && !horovod_global.shut_down) {\n"
            "    auto controller = horovod_global.process_set_table.Get(0).controller;\n"
            "    if (controller != nullptr) {\n"
            "      controller->GetStallInspector().SetStallShutdownTimeSeconds(seconds);\n"
            "    }\n"
            "  }\n"
            "}\n"
            "\n"
            "int horovod_is_initialized() {\n"
        ),
        why="a phase that is known to be long must not count as a stall of the other ranks",
    ),
    Edit(
        name="stall-report-include",
        file="horovod/common/stall_inspector.cc",
        old="#include <map>\n#include <unordered_set>\n",
        new="#include <cstdlib>\n#include <map>\n#include <unistd.h>\n#include <unordered_set>\n",
        why=_STALLS,
    ),
    Edit(
        name="stall-report",
        file="horovod/common/stall_inspector.cc",
        old="bool StallInspector::CheckForStalledTensors(\n",
        new=(
            "// Tell which tensors wait for which ranks, as a line of JSON, to who has asked for it.\n"
            "static void Report(const std::map<int32_t, std::set<std::string>>& missing_ranks,\n"
            "                   const std::vector<int>& global_ranks) {\n"
            '  const char* descriptor = std::getenv("HOROVOD_STALL_REPORT");\n'
            "  if (descriptor == nullptr) {\n"
            "    return;\n"
            "  }\n"
            "  std::stringstream line;\n"
            '  const char* before_rank = "";\n'
            '  line << "{\\"stalled\\": {";\n'
            "  for (auto& kv : missing_ranks) {\n"
            '    line << before_rank << "\\"" << global_ranks[kv.first] << "\\": [";\n'
            '    before_rank = ", ";\n'
            '    const char* before_name = "";\n'
            "    for (auto& name : kv.second) {\n"
            '      line << before_name << "\\"";\n'
            '      before_name = ", ";\n'
            "      for (unsigned char each : name) {\n"
            "        line << (each < ' ' || each == '\"' || each == '\\\\' ? '?'\n"
            "                                                            : static_cast<char>(each));\n"
            "      }\n"
            '      line << "\\"";\n'
            "    }\n"
            '    line << "]";\n'
            "  }\n"
            '  line << "}}\\n";\n'
            "  auto text = line.str();\n"
            "  if (write(std::atoi(descriptor), text.data(), text.size()) < 0) {\n"
            '    LOG(WARNING) << "The stall can\'t be reported.";\n'
            "  }\n"
            "}\n"
            "\n"
            "bool StallInspector::CheckForStalledTensors(\n"
        ),
        why=_STALLS,
    ),
    Edit(
        name="stall-reported",
        file="horovod/common/stall_inspector.cc",
        old="  if (!missing_ranks.empty()) {\n    std::stringstream message;\n",
        new=(
            "  if (!missing_ranks.empty()) {\n"
            "    Report(missing_ranks, global_ranks);\n"
            "    std::stringstream message;\n"
        ),
        why=_STALLS,
    ),
    Edit(
        name="atomic-include",
        file="horovod/common/stall_inspector.h",
        old="#include <chrono>\n",
        new="#include <atomic>\n#include <chrono>\n",
        why="the time after which ranks count as stalled is set while another thread reads it",
    ),
    Edit(
        name="atomic-stall-time",
        file="horovod/common/stall_inspector.h",
        old="  int stall_shutdown_time_seconds = 0;\n",
        new="  std::atomic<int> stall_shutdown_time_seconds{0};\n",
        why="the time after which ranks count as stalled is set while another thread reads it",
    ),
    Edit(
        name="registry-lock",
        file="horovod/runner/elastic/registration.py",
        old="        self._lock = threading.Lock()\n        self._states = {}\n",
        new=(
            "        self._lock = threading.Condition()\n"
            "        self._states = {}\n"
            "        self._waiting = {}\n"
            "        self._acting = False\n"
        ),
        why=_REGISTRY,
    ),
    Edit(
        name="registry-barrier",
        file="horovod/runner/elastic/registration.py",
        old="        self._barrier = None\n",
        new="",
        why=_REGISTRY,
    ),
    Edit(
        name="registry-event",
        file="horovod/runner/elastic/registration.py",
        old="        self._action_event = threading.Event()\n        self._action_event.set()\n",
        new="",
        why=_REGISTRY,
    ),
    Edit(
        name="registry-reset",
        file="horovod/runner/elastic/registration.py",
        old="            self._barrier = threading.Barrier(parties=size, action=self._action)\n",
        new="",
        why=_REGISTRY,
    ),
    Edit(
        name="registry",
        file="horovod/runner/elastic/registration.py",
        old="        # we should wait for _action finished",
        until="    def _on_workers_recorded(self):\n",
        new=_REGISTRY_CODE,
        why=_REGISTRY,
    ),
    Edit(
        name="host-order",
        file="horovod/runner/elastic/discovery.py",
        old="lines = set(result.strip()",
        new="lines = dict.fromkeys(result.strip()",
        why=_ORDER,
    ),
    Edit(
        name="host-order-kept",
        file="horovod/runner/elastic/discovery.py",
        old="available_hosts = set([host for host in host_slots.keys()",
        new="available_hosts = list([host for host in host_slots.keys()",
        why=_ORDER,
    ),
    Edit(
        name="noted-features",
        file="CMakeLists.txt",
        old='metadata.json" "\\"dummy\\": \\"none\\"\\n}")',
        new='metadata.json" "\\"mpi\\": \\"${HAVE_MPI}\\",\\n\\"gloo\\": \\"${HAVE_GLOO}\\"\\n}")',
        why=_SLOW_START,
    ),
    Edit(
        name="noted-features-read",
        file="horovod/common/util.py",
        old="EXTENSIONS = ['tensorflow', 'torch', 'mxnet']\n",
        new=(
            "EXTENSIONS = ['tensorflow', 'torch', 'mxnet']\n"
            "\n"
            "\n"
            "def _noted(feature):\n"
            '    """Whether the build has noted that it has a feature."""\n'
            "    here = os.path.dirname(os.path.abspath(__file__))\n"
            "    with open(os.path.join(here, os.pardir, 'metadata.json')) as file:\n"
            "        return json.load(file)[feature] == 'TRUE'\n"
        ),
        why=_SLOW_START,
    ),
    Edit(
        name="noted-mpi",
        file="horovod/common/util.py",
        old=(
            "def mpi_built(verbose=False):\n"
            "    for ext_base_name in EXTENSIONS:\n"
            "        built_fn = lambda ext: ext.mpi_built()\n"
            "        result = _check_extension_lambda(\n"
            "            ext_base_name, built_fn, 'built with MPI', verbose)\n"
            "        if result is not None:\n"
            "            return result\n"
            "    return None\n"
        ),
        new="def mpi_built(verbose=False):\n    return _noted('mpi')\n",
        why=_SLOW_START,
    ),
    Edit(
        name="noted-gloo",
        file="horovod/common/util.py",
        old=(
            "def gloo_built(verbose=False):\n"
            "    for ext_base_name in EXTENSIONS:\n"
            "        built_fn = lambda ext: ext.gloo_built()\n"
            "        result = _check_extension_lambda(\n"
            "            ext_base_name, built_fn, 'built with Gloo', verbose)\n"
            "        if result is not None:\n"
            "            return result\n"
            "    return None\n"
        ),
        new="def gloo_built(verbose=False):\n    return _noted('gloo')\n",
        why=_SLOW_START,
    ),
    Edit(
        name="no-distutils-cmake",
        file="horovod/torch/CMakeLists.txt",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_path('include'))",
        why="Python 3.12 has no distutils",
    ),
    Edit(
        name="no-distutils-runner",
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable",
        new="from shutil import which as find_executable",
        why="Python 3.12 has no distutils, and horovodrun imports this module",
    ),
)


def digest(edits: Iterable[Edit]) -> str:
    """Return a hex digest of what the edits do; names and reasons don't count."""
    parts = [part for edit in edits for part in (edit.file, edit.old, edit.until, edit.new)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def apply(edits: Iterable[Edit], source_dir: Path) -> None:
    """Apply edits, in order, to a source tree: all of them, or none.

    Args:
        edits: what to change.
        source_dir: the root of the source tree.

    Raises:
        EditError: the text of an edit does not occur exactly once; no file was changed.
    """
    texts: dict[str, str] = {}
    for edit in edits:
        path = source_dir / edit.file
        if edit.file not in texts:
            texts[edit.file] = path.read_bytes().decode() if path.is_file() else ""
        text = texts[edit.file]
        start = text.find(edit.old)
        end = text.find(edit.until, start + len(edit.old))
        found = text.count(edit.old) if end >= 0 else 0
        if found != 1:
            raise EditError(edit.name, edit.file, found)
        texts[edit.file] = text[:start] + edit.new + text[end:]
    for file, text in texts.items():
        (source_dir / file).write_bytes(text.encode())
