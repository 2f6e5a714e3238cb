"""Edits of Horovod's rendezvous: the driver answers when all have come, or says that not all will.

A worker that comes to a job is started when the others wait for it already, and imports its libraries only
then. They give it up after Gloo's time-out, which is to be short for hosts that are lost. The driver
knows better: each worker that it has started comes, or its end is recorded, or it asks for another place.
"""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit, add_after, add_before

_REGISTRY = "horovod/runner/elastic/registration.py"
_HANDLER = "horovod/runner/elastic/rendezvous.py"
_STORE = "horovod/common/gloo/http_store.cc"
_BASICS = "horovod/common/basics.py"
_WAIT_CODE = '''\
    def wait_for_all(self, arrived, seconds):
        """Wait until all have arrived; False if the round is over: a worker was lost, or asks for a place
        in the next one."""
        deadline = time.monotonic() + seconds
        with self._lock:
            rendezvous_id = self._rendezvous_id

            def is_over():
                return self._states or self._rendezvous_id != rendezvous_id or self._driver.finished()

            while not is_over() and not arrived() and time.monotonic() < deadline:
                self._lock.wait(1.0)
            return not is_over()

    def wake(self):
        with self._lock:
            self._lock.notify_all()

    def size(self):
'''
_HANDLER_CODE = '''\
    class ElasticRendezvousHandler(RendezvousHandler):
        def do_GET(self):
            _, scope, key = (self.path.split('/') + ['', ''])[:3]
            if key.isdigit() and not driver.wait_for_all(lambda: self._all_in(scope)):
                self.send_status_code(GONE)
            else:
                super().do_GET()

        def _all_in(self, scope):
            """Whether all ranks of a scope have told their addresses, if its size is known."""
            with self.server.cache_lock:
                told = sum(key.isdigit() for key in self.server.cache.get(scope, {}))
                return told >= self.server.scope_size.get(scope, 0)

'''
_TRY_AGAIN_CODE = '''\
    process_sets = ()  # of the last initialization

    def _initialization_error(self):
        function = self.MPI_LIB_CTYPES.horovod_initialization_error
        function.restype = ctypes.c_char_p
        return function().decode(errors="replace")

    def _initialize(self, attempt):
        """Try round after round while another one may come: the driver says so, or a rank was lost while
        connecting. Return whether one was a success."""
        deadline = time.monotonic() + float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", "600"))
        failures = 0
        while not attempt():
            error = self._initialization_error()
            if "the round is over" not in error:
                failures += 1
            if (os.environ.get("HOROVOD_ELASTIC") != "1" or "has been removed" in error
                    or "process set" in error or failures >= 4 or time.monotonic() > deadline):
                return False
            self.shutdown()
        return True

    def shutdown(self):
'''


RENDEZVOUS: tuple[Edit, ...] = (
    # A worker that joins a running job and takes longer than HOROVOD_GLOO_TIMEOUT_SECONDS to import its
    # libraries fails, which ends the job where no other host is left.
    add_after("rendezvous-time", _REGISTRY, "import logging\nimport threading\n", "import time\n"),
    Edit("rendezvous-wait", _REGISTRY, "    def size(self):\n", _WAIT_CODE),
    add_before(
        "rendezvous-driver",
        "horovod/runner/elastic/driver.py",
        "    def record_ready(self, host, slot):\n",
        (
            "    def wait_for_all(self, arrived):\n"
            "        return self._worker_registry.wait_for_all(arrived, self._timeout)\n"
            "\n"
            "    def wake(self):\n"
            "        self._worker_registry.wake()\n"
            "\n"
            "    def round(self):\n"
            "        return self._worker_registry.last_rendezvous()\n"
            "\n"
        ),
    ),
    # Ranks wait for a time-out though a rank is known to be lost, and a new worker ends with an error.
    add_before("rendezvous-status", _HANDLER, "def create_rendezvous_handler(driver):\n", "GONE = 410\n\n\n"),
    # A worker that joins a running job and takes longer than HOROVOD_GLOO_TIMEOUT_SECONDS to import its
    # libraries fails, which ends the job where no other host is left.
    Edit(
        "rendezvous-answers",
        _HANDLER,
        "    class ElasticRendezvousHandler(RendezvousHandler):\n",
        _HANDLER_CODE,
    ),
    add_after(
        "rendezvous-complete",
        _HANDLER,
        "            super(RendezvousHandler, self)._put_value(scope, key, value)\n",
        "            if self._all_in(scope):\n                driver.wake()\n",
    ),
    # Ranks wait for a time-out though a rank is known to be lost, and a new worker ends with an error.
    Edit(
        "round-over-answered",
        _STORE,
        "if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {\n",
        (
            "if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND &&\n"
            "          response.status != HTTP_GONE) {\n"
        ),
    ),
    add_before(
        "round-over",
        _STORE,
        "  // If the key is not present, return false.\n",
        (
            "  if (response.status == HTTP_GONE) {\n"
            "    throw std::runtime_error(\n"
            '        "the round is over: before all had met, a rank was lost or came anew");\n'
            "  }\n"
        ),
    ),
    add_after(
        "round-over-status",
        "horovod/common/gloo/http_store.h",
        "#define HTTP_NOT_FOUND 404\n",
        "#define HTTP_GONE 410\n",
    ),
    add_after("next-round-time", _BASICS, "import ctypes\nimport os\n", "import time\n"),
    Edit(
        "next-round",
        _BASICS,
        (
            "            initialization_ok = self.MPI_LIB_CTYPES.horovod_init(\n"
            "                (ctypes.c_int * comm_size)(*comm), ctypes.c_int(comm_size),\n"
            "                *process_set_args_via_ranks)\n"
        ),
        (
            "            initialization_ok = self._initialize(lambda: self.MPI_LIB_CTYPES.horovod_init(\n"
            "                (ctypes.c_int * comm_size)(*comm), ctypes.c_int(comm_size),\n"
            "                *process_set_args_via_ranks))\n"
        ),
    ),
    Edit(
        "next-round-error",
        _BASICS,
        (
            "            raise ValueError(\n"
            '                "Horovod initialization failed. Please check log messages above for a more '
            'descriptive error.")\n'
        ),
        '            raise ValueError(f"Horovod initialization failed: {self._initialization_error()}")\n',
    ),
    # A worker that has just come ends with an error if another is lost while all connect.
    Edit("next-round-tried", _BASICS, "    def shutdown(self):\n", _TRY_AGAIN_CODE),
    # Why process sets could not be made is known to the log only, and not all ranks may have failed.
    add_after(
        "process-sets-error",
        "horovod/common/operations.cc",
        '        << "Horovod could not be initialized: " << ex.what();\n',
        "    InitializationError() = ex.what();\n    state.process_set_table.peer_lost = true;\n",
    ),
    # Recovery makes the process sets again after a rendezvous, so it needs a list of them.
    Edit(
        "process-sets-kept",
        _BASICS,
        "        process_sets = list(process_sets)\n",
        "        process_sets = self.process_sets = list(process_sets)\n",
    ),
    # A process that joins a running job does not know, and waits for ever in a script's first broadcasts.
    add_before(
        "round-told",
        _HANDLER,
        "            return super(RendezvousHandler, self)._get_value(scope, key)\n",
        (
            "            if scope == GET_ROUND:\n"
            "                return str(driver.round()).encode('ascii')\n"
            "\n"
        ),
    ),
    add_after("round-scope", _HANDLER, "GET_RANK_AND_SIZE = 'rank_and_size'\n", "GET_ROUND = 'round'\n"),
    Edit(
        "groups-without-broadcast",
        "horovod/torch/optimizer.py",
        (
            "            # To ensure parameter order and group formation is consistent, broadcast "
            "p_list order\n"
            "            # from rank 0 and use for every worker\n"
        ),
        (
            "            # All ranks have the same names, and so the same groups.\n"
            "            p_list.sort(key=self._parameter_names.get)\n"
            "\n"
        ),
        until="            # Form groups\n",
    ),
)
