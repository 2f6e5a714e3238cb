"""Edits of how a thread waits for a collective of torch: asleep until it is done, where it spun."""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit, add_after, add_before

_HEADER = "horovod/torch/handle_manager.h"
_MANAGER = "horovod/torch/handle_manager.cc"


TORCH_WAIT: tuple[Edit, ...] = (
    # A rank that waits for another keeps a core busy, which the other may need.
    add_after("torch-wait-include", _HEADER, "#include <atomic>\n", "#include <condition_variable>\n"),
    add_after(
        "torch-wait-declared",
        _HEADER,
        "  bool PollHandle(int handle);\n",
        "  void WaitForHandle(int handle);\n",
    ),
    add_after(
        "torch-wait-condition",
        _HEADER,
        "  std::mutex mutex_;\n",
        (
            "  // Never destroyed: at the end of the process that would wait for threads that wait for it.\n"
            "  std::condition_variable& changed_ = *new std::condition_variable;\n"
        ),
    ),
    add_after(
        "torch-wait-done",
        _MANAGER,
        "  results_[handle] = std::make_shared<Status>(status);\n",
        "  changed_.notify_all();\n",
    ),
    # A thread that waits for a handle must learn that the handle was deleted.
    add_after("torch-wait-reset", _MANAGER, "  results_.clear();\n", "  changed_.notify_all();\n"),
    # A rank that waits for another keeps a core busy, which the other may need.
    add_before(
        "torch-wait",
        _MANAGER,
        "std::shared_ptr<Status> HandleManager::ReleaseHandle(int handle) {\n",
        (
            "// Wait until the handle is done or has been cleared.\n"
            "void HandleManager::WaitForHandle(int handle) {\n"
            "  std::unique_lock<std::mutex> lock(mutex_);\n"
            "  changed_.wait(lock, [this, handle] {\n"
            "    auto result = results_.find(handle);\n"
            "    return result == results_.end() || result->second != nullptr;\n"
            "  });\n"
            "}\n"
            "\n"
        ),
    ),
    Edit(
        "torch-wait-used",
        "horovod/torch/mpi_ops_v2.cc",
        "      std::this_thread::yield();\n",
        "      handle_manager.WaitForHandle(handle);\n",
    ),
)
