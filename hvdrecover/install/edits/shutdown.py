"""Edits of how Horovod fails the collectives that are under way when it shuts down, or when a rank was lost.

Horovod's thread drops their tensors while it holds two mutexes. Dropping the last reference to a tensor of
torch takes Python's lock. A thread that starts another collective holds it, and waits for these mutexes.
So a rank that is told of a loss and goes straight to its next collective waits for ever.
"""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit, add_after, add_before

_HEADER = "horovod/common/tensor_queue.h"
_QUEUE = "horovod/common/tensor_queue.cc"
_LOOP = "horovod/common/operations.cc"

SHUTDOWN: tuple[Edit, ...] = (
    # A rank that starts a collective right after one has failed may wait for ever, with Python's lock.
    Edit(
        "shutdown-unlocked",
        _QUEUE,
        (
            "  std::lock_guard<std::mutex> guard(mutex_);\n"
            "  for (auto& e : tensor_table_) {\n"
            "    e.second.FinishWithCallback(status);\n"
            "  }\n"
            "  tensor_table_.clear();\n"
            "  while (!message_queue_.empty()) {\n"
            "    message_queue_.pop();\n"
            "  }\n"
        ),
        (
            "  std::unordered_map<std::string, TensorTableEntry> failed;\n"
            "  {\n"
            "    std::lock_guard<std::mutex> guard(mutex_);\n"
            "    closed_ = true;\n"
            "    failed.swap(tensor_table_);\n"
            "    while (!message_queue_.empty()) {\n"
            "      message_queue_.pop();\n"
            "    }\n"
            "  }\n"
            "  for (auto& e : failed) {\n"
            "    e.second.FinishWithCallback(status);\n"
            "  }\n"
        ),
    ),
    add_after(
        "shutdown-before-mutex",
        _LOOP,
        "  // Signal that shutdown has been requested.\n  state.shut_down = true;\n",
        (
            "\n"
            "  // Before the table's mutex is taken, for which a thread with Python's lock may wait.\n"
            "  for (auto id : state.process_set_table.Ids()) {\n"
            "    state.process_set_table.Get(id).tensor_queue.FinalizeTensorQueue(\n"
            "        SHUT_DOWN_ERROR);\n"
            "  }\n"
        ),
    ),
    # A collective that is started while Horovod shuts down may be queued after all others have failed.
    add_after(
        "shutdown-closed",
        _HEADER,
        "  mutable std::mutex mutex_;\n",
        (
            "\n"
            "  // All that waited was failed; nothing that comes now would ever be answered.\n"
            "  bool closed_ = false;\n"
        ),
    ),
    add_after(
        "shutdown-open",
        _HEADER,
        "class TensorQueue {\npublic:\n",
        (
            "  // Take what comes, after an earlier finalization.\n"
            "  void Open() {\n"
            "    std::lock_guard<std::mutex> guard(mutex_);\n"
            "    closed_ = false;\n"
            "  }\n"
            "\n"
        ),
    ),
    add_before(
        "shutdown-opened",
        _LOOP,
        "    horovod_global.background_thread =\n",
        "    horovod_global.process_set_table.Get(0).tensor_queue.Open();\n",
    ),
    *(
        Edit(
            f"shutdown-{kind}",
            _QUEUE,
            f"{arguments}) {{\n  std::lock_guard<std::mutex> guard(mutex_);\n",
            (
                f"{arguments}) {{\n"
                "  std::lock_guard<std::mutex> guard(mutex_);\n"
                "  if (closed_) {\n"
                "    return SHUT_DOWN_ERROR;\n"
                "  }\n"
            ),
        )
        for kind, arguments in (
            ("late", "AddToTensorQueue(TensorTableEntry& e, Request& message"),
            (
                "late-group",
                "AddToTensorQueueMulti(std::vector<TensorTableEntry>& entries,\n"
                "                                          std::vector<Request>& messages",
            ),
        )
    ),
)
