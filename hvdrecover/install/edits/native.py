"""Edits of what is compiled: its build, the controller, the stall inspector, and functions for recovery."""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit

_STALLS = "which tensors wait for which ranks is printed by rank 0, and known to nobody else"
_CPP20 = "the headers of current PyTorch and TensorFlow need C++20"


NATIVE: tuple[Edit, ...] = (
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
        name="group-table-string",
        file="horovod/common/group_table.h",
        old="#include <queue>\n",
        new="#include <queue>\n#include <string>\n",
        why="GCC 13 and later don't bring std::string along with other headers",
    ),
    Edit(
        name="flatbuffers-span",
        file="third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        old="  pointer const data_;\n  const size_type count_;\n",
        new="  pointer data_;\n  size_type count_;\n",
        why="its operator= assigns to constants, which GCC 14 refuses even where nobody calls it",
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
        name="first-rendezvous",
        file="horovod/common/gloo/gloo_context.cc",
        old=(
            "  ctx = Rendezvous(HOROVOD_GLOO_GLOBAL_PREFIX,\n"
            "                   rendezvous_addr_env, rendezvous_port,\n"
            "                   rank, size, dev, timeout_);\n"
        ),
        new=(
            "  // An elastic driver gives addresses out when all have come.\n"
            "  auto patience = elastic || reset_\n"
            "                      ? timeout_\n"
            "                      : std::max<std::chrono::milliseconds>(\n"
            "                            timeout_, std::chrono::seconds(60));\n"
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
            "    InitializationError().clear();\n"
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
)
