"""Edits of what is compiled: its build, the controller, the stall inspector, and functions for recovery."""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit, add_after, add_before

_GLOO = "horovod/common/gloo/gloo_context.cc"
_LOOP = "horovod/common/operations.cc"
_STALLS = "horovod/common/stall_inspector.cc"
_STALL_HEADER = "horovod/common/stall_inspector.h"

NATIVE: tuple[Edit, ...] = (
    # The headers of current PyTorch and TensorFlow need C++20.
    Edit("c++20", "CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    Edit(
        "c++20-torch",
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
    ),
    Edit(
        "c++20-tensorflow",
        "horovod/tensorflow/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 17)",
        "set(CMAKE_CXX_STANDARD 20)",
    ),
    # GCC 13 and later don't bring std::string along with other headers.
    add_after(
        "group-table-string", "horovod/common/group_table.h", "#include <queue>\n", "#include <string>\n"
    ),
    # Its operator= assigns to constants. GCC 14 refuses that even without a call.
    Edit(
        "flatbuffers-span",
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  pointer const data_;\n  const size_type count_;\n",
        "  pointer data_;\n  size_type count_;\n",
    ),
    # A wheel must find the frameworks and libmpi of the environment that it is installed in, not of the one
    # that it was built in; a site's own MPI, CUDA and NCCL come after these.
    add_after(
        "relative-rpath",
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
        (
            "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
            "set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)\n"
            'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../torch/lib;$ORIGIN/../../tensorflow;'
            '$ORIGIN/../../tensorflow/python;$ORIGIN/../../../..")\n'
        ),
    ),
    # It includes an XLA header that TensorFlow no longer ships.
    Edit(
        "no-xla-ops",
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # The vector stays empty under Gloo, and so the stall inspector never fires.
    Edit(
        "stall-inspector",
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_)",
        "global_ranks_.resize(size_)",
    ),
    # Process sets ignore HOROVOD_GLOO_IFACE, and hosts whose name means 127.0.0.1 can't connect.
    add_before(
        "gloo-iface",
        _GLOO,
        (
            "  device_attr.iface = gloo_iface_;\n"
            "  device_attr.ai_family = AF_UNSPEC;\n"
            "  auto dev = CreateDevice(device_attr);\n"
            "\n"
            "  global_ctx"
        ),
        "  gloo_iface_ = global_context.gloo_iface_;\n",
    ),
    # After hvd.shutdown() the sockets and two threads that wake every 10 ms would stay.
    add_before(
        "process-set-finalize",
        _GLOO,
        "  global_ctx = global_context.ctx;\n  timeout_ = global_context.timeout_;\n",
        "  enabled_ = true;\n",
    ),
    # Processes start at different speeds, which a timeout that is short for lost hosts must allow.
    Edit(
        "first-rendezvous",
        _GLOO,
        (
            "  ctx = Rendezvous(HOROVOD_GLOO_GLOBAL_PREFIX,\n"
            "                   rendezvous_addr_env, rendezvous_port,\n"
            "                   rank, size, dev, timeout_);\n"
        ),
        (
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
    ),
    # Ranks wait five times HOROVOD_GLOO_TIMEOUT_SECONDS for one that is lost while they connect.
    Edit(
        "connect-timeout",
        "third_party/gloo/gloo/transport/tcp/pair.h",
        "        timeout_ * 5,\n",
        "        timeout_,\n",
    ),
    # A rank that is lost while all connect aborts the others, which lose their memory.
    Edit(
        "init-failure",
        _LOOP,
        (
            "    global_gloo_context.Initialize(ParseGlooIface());\n"
            "  }\n"
            "  if (state.control_operation == LibType::GLOO) {\n"
            "    // Initializes global controller\n"
            "    state.process_set_table.Initialize(global_gloo_context);\n"
            "  }\n"
        ),
        (
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
    ),
    # Who calls hvd.init() has to tell a lost rank from having been removed from the job.
    add_before(
        "init-failure-text",
        _LOOP,
        "void BackgroundThreadLoop(HorovodGlobalState& state) {\n",
        (
            "// Why the last initialization failed.\n"
            "static std::string& InitializationError() {\n"
            "  static std::string text;\n"
            "  return text;\n"
            "}\n"
            "\n"
        ),
    ),
    # After one failed initialization all later ones would count as failed.
    Edit(
        "init-again",
        _LOOP,
        "    // Reset initialization flag\n    horovod_global.initialization_done = false;\n",
        (
            "    // Reset initialization flags\n"
            "    horovod_global.initialization_done = false;\n"
            "    horovod_global.initialization_failed = false;\n"
            "    InitializationError().clear();\n"
        ),
    ),
    # A phase that is known to be long must not count as a stall of the other ranks.
    add_before(
        "recovery-functions",
        _LOOP,
        "int horovod_is_initialized() {\n",
        (
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
        ),
    ),
    # Horovod's rank 0 only prints the names of tensors that wait for other ranks; a guardian needs them.
    Edit(
        "stall-report-include",
        _STALLS,
        "#include <map>\n#include <unordered_set>\n",
        "#include <cstdlib>\n#include <map>\n#include <unistd.h>\n#include <unordered_set>\n",
    ),
    add_before(
        "stall-report",
        _STALLS,
        "bool StallInspector::CheckForStalledTensors(\n",
        (
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
        ),
    ),
    Edit(
        "stall-reported",
        _STALLS,
        "  if (!missing_ranks.empty()) {\n    std::stringstream message;\n",
        (
            "  if (!missing_ranks.empty()) {\n"
            "    Report(missing_ranks, global_ranks);\n"
            "    std::stringstream message;\n"
        ),
    ),
    # The time after which ranks count as stalled is set while another thread reads it.
    add_before("atomic-include", _STALL_HEADER, "#include <chrono>\n", "#include <atomic>\n"),
    Edit(
        "atomic-stall-time",
        _STALL_HEADER,
        "  int stall_shutdown_time_seconds = 0;\n",
        "  std::atomic<int> stall_shutdown_time_seconds{0};\n",
    ),
)
