"""Edits of how Gloo and Horovod take what comes after a rank was lost in the middle of a collective.

Gloo knows messages by the kind of their collective only, and Horovod starts the next collective after one has
failed. Other ranks still have the failed one, and may take the next one's messages for it. Where a message is
longer than expected, Gloo throws in its own thread, where nobody catches, and the process aborts. What is
left over blocks a connection, so that its loss shows by the time-out only.

With process sets, Horovod's thread asks all ranks whether to remove each set, also after one was lost. What
`hvd.join()` has noted stays in the global process set, which outlives a shutdown.
"""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit

_PAIR = "third_party/gloo/gloo/transport/tcp/pair.cc"
_LOOP = "horovod/common/operations.cc"
_ABORT = "what Gloo's own thread throws ends the process, where the error of one connection is meant"
_NEXT = "the next collective's messages are taken for those of the one that has failed on this rank"
_SETS = "horovod/common/process_set.cc"
_ASKED = "with process sets, ranks that remain ask the lost one before they shut down, and abort"
_JOINED = "a rank that had joined when another was lost still counts as joined after the next rendezvous"
_NO_ZEROS = "a rank that has joined takes part in allgathers that are cached, with zeros, and dies of SIGSEGV"
_SHORT = "what the ranks that have not joined send is written behind the end of an array"
_UNTOLD = "who waits for a message of which a part was sent or read waits until Gloo's time-out"

LOST_PEER: tuple[Edit, ...] = (
    Edit(
        name="pair-error-try",
        file=_PAIR,
        old="  // State must be <= CONNECTED.\n",
        new="  try {\n  // State must be <= CONNECTED.\n",
        why=_ABORT,
    ),
    Edit(
        name="pair-error-catch",
        file=_PAIR,
        old='  GLOO_ENFORCE(false, "Unexpected state: ", state_);\n',
        new=(
            '  GLOO_ENFORCE(false, "Unexpected state: ", state_);\n'
            "  } catch (const std::exception& ex) {\n"
            "    // A pair with an exception has been closed already.\n"
            "    if (ex_ == nullptr) {\n"
            "      signalException(GLOO_ERROR_MSG(ex.what()));\n"
            "    }\n"
            "  }\n"
        ),
        why=_ABORT,
    ),
    Edit(
        name="pair-error-accepted",
        file=_PAIR,
        old="  // Connected, replace file descriptor\n  fd_ = rv;\n",
        new=(
            "  // Connected, replace file descriptor\n"
            "  fd_ = rv;\n"
            "  // Closing the pair takes a descriptor that is registered.\n"
            "  device_->registerDescriptor(fd_, EPOLLIN, this);\n"
        ),
        why=f"{_ABORT}, such as that of a peer that was lost as soon as it had connected",
    ),
    Edit(
        name="partly-sent",
        file=_PAIR,
        old="    if (op.buf != nullptr) {\n      op.buf->signalException(ex);\n    }\n  }\n",
        new=(
            "    if (op.buf != nullptr) {\n"
            "      op.buf->signalException(ex);\n"
            "    }\n"
            "    NonOwningPtr<UnboundBuffer> buf(op.ubuf);\n"
            "    if (buf) {\n"
            "      buf->signalException(ex);\n"
            "    }\n"
            "  }\n"
            "\n"
            "  // The operation of which a part has been received.\n"
            "  NonOwningPtr<UnboundBuffer> partlyRead(rx_.ubuf);\n"
            "  if (partlyRead) {\n"
            "    partlyRead->signalException(ex);\n"
            "  }\n"
        ),
        why=_UNTOLD,
    ),
    Edit(
        name="stop-at-loss-include",
        file=_LOOP,
        old='#include "gloo/gloo_controller.h"\n',
        new='#include "gloo/common/error.h"\n#include "gloo/gloo_controller.h"\n',
        why=_NEXT,
    ),
    Edit(
        name="stop-at-loss",
        file=_LOOP,
        old=(
            "  try {\n"
            "    // process_set is passed here only for the case of Response::JOIN where\n"
            "    // entries is empty. The other operations can infer process_set from\n"
            "    // entries.\n"
            "    status = op_manager->ExecuteOperation(entries, response, process_set);\n"
        ),
        new=(
            "  std::exception_ptr loss;\n"
            "  try {\n"
            "    // process_set is passed here only for the case of Response::JOIN where\n"
            "    // entries is empty. The other operations can infer process_set from\n"
            "    // entries.\n"
            "    status = op_manager->ExecuteOperation(entries, response, process_set);\n"
            "#if HAVE_GLOO\n"
            "  } catch (const gloo::IoException& ex) {\n"
            "    loss = std::current_exception();\n"
            "    status = Status::UnknownError(ex.what());\n"
            "#endif // HAVE_GLOO\n"
        ),
        why=_NEXT,
    ),
    Edit(
        name="stop-at-loss-thrown",
        file=_LOOP,
        old=(
            "      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);\n"
            "      e.FinishWithCallback(status);\n"
            "    }\n"
            "  }\n"
        ),
        new=(
            "      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);\n"
            "      e.FinishWithCallback(status);\n"
            "    }\n"
            "  }\n"
            "  if (loss) {\n"
            "    std::rethrow_exception(loss); // ends this thread's loop\n"
            "  }\n"
        ),
        why=_NEXT,
    ),
    Edit(
        name="process-sets-lost-flag",
        file="horovod/common/process_set.h",
        old="  mutable std::recursive_mutex mutex;\n",
        new=(
            "  mutable std::recursive_mutex mutex;\n"
            "\n"
            "  // Whether the ranks can no longer agree on the removal of a process set.\n"
            "  std::atomic_bool peer_lost{false};\n"
        ),
        why=_ASKED,
    ),
    Edit(
        name="process-sets-lost",
        file=_LOOP,
        old='        << "Horovod background loop uncaught exception: " << ex.what();\n',
        new=(
            '        << "Horovod background loop uncaught exception: " << ex.what();\n'
            "    state.process_set_table.peer_lost = true;\n"
        ),
        why=_ASKED,
    ),
    Edit(
        name="process-sets-removed",
        file=_SETS,
        old=(
            "    MarkProcessSetForRemoval(id);\n"
            "    // Block until all processes have been able to finalize and deregister\n"
            "    // this process set.\n"
        ),
        until="  // The process set hosting the global controller needs to remain in the\n",
        new=(
            "    // Block until all processes have been able to finalize and deregister\n"
            "    // this process set. If one is lost, do so alone.\n"
            "    id_to_be_removed_ = id;\n"
            "    try {\n"
            "      while (!peer_lost && id_to_be_removed_ != SUCCESSFUL_REMOVAL) {\n"
            "        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);\n"
            "        std::this_thread::sleep_for(std::chrono::milliseconds(1));\n"
            "      }\n"
            "    } catch (const std::exception& ex) {\n"
            "      peer_lost = true;\n"
            "    }\n"
            "    if (Contains(id)) {\n"
            "      Get(id).Finalize(status);\n"
            "      DeregisterProcessSet(id);\n"
            "    }\n"
            "  }\n"
            "  peer_lost = false;\n"
            "  id_to_be_removed_ = NO_PENDING_REMOVAL;\n"
        ),
        why=_ASKED,
    ),
    Edit(
        name="joined-forgotten",
        file=_SETS,
        old="  registered_global_ranks.clear();\n  initialization_done = false;\n",
        new=(
            "  registered_global_ranks.clear();\n"
            "  joined = false;\n"
            "  joined_size = 0;\n"
            "  last_joined_rank = -1;\n"
            "  initialization_done = false;\n"
        ),
        why=_JOINED,
    ),
    Edit(
        name="joined-cached",
        file="horovod/common/controller.cc",
        old=(
            "    for (uint32_t bit : response_cache_.list_all_bits()) {\n"
            "      cache_coordinator.record_hit(bit);\n"
            "    }\n"
        ),
        new=(
            "    for (uint32_t bit : response_cache_.list_all_bits()) {\n"
            "      auto type = response_cache_.peek_response(bit).response_type();\n"
            "      if (type == Response::ALLREDUCE || type == Response::ADASUM) {\n"
            "        cache_coordinator.record_hit(bit);\n"
            "      } else {\n"
            "        // Negotiated anew, and refused.\n"
            "        cache_coordinator.record_invalid_bit(bit);\n"
            "        cache_coordinator.set_uncached_in_queue(true);\n"
            "      }\n"
            "    }\n"
        ),
        why=_NO_ZEROS,
    ),
    Edit(
        name="joined-sizes",
        file="horovod/common/controller.cc",
        old="    tensor_sizes.resize(requests.size());\n",
        new="    tensor_sizes.resize(size_);\n",
        why=_SHORT,
    ),
    Edit(
        name="joined-devices",
        file="horovod/common/controller.cc",
        old=(
            "  std::vector<int32_t> devices(requests.size());\n"
            "  for (auto& request : requests) {\n"
            "    devices[request.request_rank()] = request.device();\n"
            "  }\n"
        ),
        new=(
            "  std::vector<int32_t> devices(size_);\n"
            "  for (auto& request : requests) {\n"
            "    devices[request.request_rank()] = request.device();\n"
            "  }\n"
            "  devices.resize(requests.size());\n"
        ),
        why=_SHORT,
    ),
)
