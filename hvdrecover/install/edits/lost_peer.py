"""Edits of how Gloo and Horovod take what comes after a rank was lost in the middle of a collective.

Gloo knows messages by the kind of their collective only, and Horovod starts the next collective after one has
failed. Other ranks still have the failed one, and may take the next one's messages for it. Where a message is
longer than expected, Gloo throws in its own thread, where nobody catches, and the process aborts. What is
left over blocks a connection, so that its loss shows by the time-out only.
"""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit

_PAIR = "third_party/gloo/gloo/transport/tcp/pair.cc"
_LOOP = "horovod/common/operations.cc"
_ABORT = "what Gloo's own thread throws ends the process, where the error of one connection is meant"
_NEXT = "the next collective's messages are taken for those of the one that has failed on this rank"
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
)
