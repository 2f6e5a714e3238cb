"""Edits of how a thread waits for a collective of torch: asleep until it is done, where it spun."""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit

_SPINS = "a rank that waits for another keeps a core busy, which the other may need"
_HEADER = "horovod/torch/handle_manager.h"
_MANAGER = "horovod/torch/handle_manager.cc"


TORCH_WAIT: tuple[Edit, ...] = (
    Edit(
        name="torch-wait-include",
        file=_HEADER,
        old="#include <atomic>\n",
        new="#include <atomic>\n#include <condition_variable>\n",
        why=_SPINS,
    ),
    Edit(
        name="torch-wait-declared",
        file=_HEADER,
        old="  bool PollHandle(int handle);\n",
        new="  bool PollHandle(int handle);\n  void WaitForHandle(int handle);\n",
        why=_SPINS,
    ),
    Edit(
        name="torch-wait-condition",
        file=_HEADER,
        old="  std::mutex mutex_;\n",
        new=(
            "  std::mutex mutex_;\n"
            "  // Never destroyed: at the end of the process that would wait for threads that wait for it.\n"
            "  std::condition_variable& changed_ = *new std::condition_variable;\n"
        ),
        why=_SPINS,
    ),
    Edit(
        name="torch-wait-done",
        file=_MANAGER,
        old="  results_[handle] = std::make_shared<Status>(status);\n",
        new="  results_[handle] = std::make_shared<Status>(status);\n  changed_.notify_all();\n",
        why=_SPINS,
    ),
    Edit(
        name="torch-wait-reset",
        file=_MANAGER,
        old="  results_.clear();\n",
        new="  results_.clear();\n  changed_.notify_all();\n",
        why="a thread that waits for a handle that is no more must learn it, as one that polls does",
    ),
    Edit(
        name="torch-wait",
        file=_MANAGER,
        old="std::shared_ptr<Status> HandleManager::ReleaseHandle(int handle) {\n",
        new=(
            "// Wait until the handle is done or has been cleared.\n"
            "void HandleManager::WaitForHandle(int handle) {\n"
            "  std::unique_lock<std::mutex> lock(mutex_);\n"
            "  changed_.wait(lock, [this, handle] {\n"
            "    auto result = results_.find(handle);\n"
            "    return result == results_.end() || result->second != nullptr;\n"
            "  });\n"
            "}\n"
            "\n"
            "std::shared_ptr<Status> HandleManager::ReleaseHandle(int handle) {\n"
        ),
        why=_SPINS,
    ),
    Edit(
        name="torch-wait-used",
        file="horovod/torch/mpi_ops_v2.cc",
        old="      std::this_thread::yield();\n",
        new="      handle_manager.WaitForHandle(handle);\n",
        why=_SPINS,
    ),
)
