"""Edits of how Gloo and Horovod take what comes after a rank was lost in the middle of a collective.

Gloo knows messages by the kind of their collective only, and Horovod starts the next collective after one has
failed. Other ranks still have the failed one, and may take the next one's messages for it. Where a message is
longer than expected, Gloo throws in its own thread, where nobody catches, and the process aborts. What is
left over blocks a connection, so that its loss shows by the time-out only.

With process sets, Horovod's thread asks all ranks whether to remove each set, also after one was lost. What
`hvd.join()` has noted stays in the global process set, which outlives a shutdown.
"""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit, add_after, add_before

_PAIR = "third_party/gloo/gloo/transport/tcp/pair.cc"
_LOOP = "horovod/common/operations.cc"
_SETS = "horovod/common/process_set.cc"

LOST_PEER: tuple[Edit, ...] = (
    # What Gloo's own thread throws ends the process, where the error of one connection is meant.
    add_before("pair-error-try", _PAIR, "  // State must be <= CONNECTED.\n", "  try {\n"),
    add_after(
        "pair-error-catch",
        _PAIR,
        '  GLOO_ENFORCE(false, "Unexpected state: ", state_);\n',
        (
            "  } catch (const std::exception& ex) {\n"
            "    // A pair with an exception has been closed already.\n"
            "    if (ex_ == nullptr) {\n"
            "      signalException(GLOO_ERROR_MSG(ex.what()));\n"
            "    }\n"
            "  }\n"
        ),
    ),
    # The same if a peer is lost as soon as it has connected.
    add_after(
        "pair-error-accepted",
        _PAIR,
        "  // Connected, replace file descriptor\n  fd_ = rv;\n",
        (
            "  // Closing the pair takes a descriptor that is registered.\n"
            "  device_->registerDescriptor(fd_, EPOLLIN, this);\n"
        ),
    ),
    # Who waits for a message of which a part was sent or read waits until Gloo's time-out.
    Edit(
        "partly-sent",
        _PAIR,
        "    if (op.buf != nullptr) {\n      op.buf->signalException(ex);\n    }\n  }\n",
        (
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
    ),
    # This rank takes the next collective's messages for messages of the one that has failed here.
    add_before(
        "stop-at-loss-include",
        _LOOP,
        '#include "gloo/gloo_controller.h"\n',
        '#include "gloo/common/error.h"\n',
    ),
    Edit(
        "stop-at-loss",
        _LOOP,
        (
            "  try {\n"
            "    // process_set is passed here only for the case of Response::JOIN where\n"
            "    // entries is empty. The other operations can infer process_set from\n"
            "    // entries.\n"
            "    status = op_manager->ExecuteOperation(entries, response, process_set);\n"
        ),
        (
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
    ),
    add_after(
        "stop-at-loss-thrown",
        _LOOP,
        (
            "      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);\n"
            "      e.FinishWithCallback(status);\n"
            "    }\n"
            "  }\n"
        ),
        "  if (loss) {\n    std::rethrow_exception(loss); // ends this thread's loop\n  }\n",
    ),
    # With process sets, ranks that remain ask the lost one before they shut down, and abort.
    add_after(
        "process-sets-lost-flag",
        "horovod/common/process_set.h",
        "  mutable std::recursive_mutex mutex;\n",
        (
            "\n"
            "  // Whether the ranks can no longer agree on the removal of a process set.\n"
            "  std::atomic_bool peer_lost{false};\n"
        ),
    ),
    add_after(
        "process-sets-lost",
        _LOOP,
        '        << "Horovod background loop uncaught exception: " << ex.what();\n',
        "    state.process_set_table.peer_lost = true;\n",
    ),
    Edit(
        "process-sets-removed",
        _SETS,
        (
            "    MarkProcessSetForRemoval(id);\n"
            "    // Block until all processes have been able to finalize and deregister\n"
            "    // this process set.\n"
        ),
        (
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
        until="  // The process set hosting the global controller needs to remain in the\n",
    ),
    # A rank that had joined when another was lost still counts as joined after the next rendezvous.
    Edit(
        "joined-forgotten",
        _SETS,
        "  registered_global_ranks.clear();\n  initialization_done = false;\n",
        (
            "  registered_global_ranks.clear();\n"
            "  joined = false;\n"
            "  joined_size = 0;\n"
            "  last_joined_rank = -1;\n"
            "  initialization_done = false;\n"
        ),
    ),
    # A rank that has joined takes part in allgathers that are cached, with zeros, and dies of SIGSEGV.
    Edit(
        "joined-cached",
        "horovod/common/controller.cc",
        (
            "    for (uint32_t bit : response_cache_.list_all_bits()) {\n"
            "      cache_coordinator.record_hit(bit);\n"
            "    }\n"
        ),
        (
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
    ),
    # Values of the ranks that have not joined are written behind the end of an array.
    Edit(
        "joined-sizes",
        "horovod/common/controller.cc",
        "    tensor_sizes.resize(requests.size());\n",
        "    tensor_sizes.resize(size_);\n",
    ),
    Edit(
        "joined-devices",
        "horovod/common/controller.cc",
        (
            "  std::vector<int32_t> devices(requests.size());\n"
            "  for (auto& request : requests) {\n"
            "    devices[request.request_rank()] = request.device();\n"
            "  }\n"
        ),
        (
            "  std::vector<int32_t> devices(size_);\n"
            "  for (auto& request : requests) {\n"
            "    devices[request.request_rank()] = request.device();\n"
            "  }\n"
            "  devices.resize(requests.size());\n"
        ),
    ),
)
