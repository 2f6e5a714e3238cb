"""Edits of Horovod's launcher: its registry of workers, its order of hosts, the features of its build."""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit

_REGISTRY = (
    "a worker that is restarted while it waits for the others counts twice, or another is left at a barrier "
    "to which nobody else comes: then ranks wait for each other for ever"
)
_ORDER = "of the hosts that are discovered at once, chance decides which are used and which are spare"
_SLOW_START = "horovodrun imports TensorFlow, just to learn whether Gloo is built in: seconds at each start"
_REGISTRY_CODE = """\
        key = (host, slot)
        with self._lock:
            self._lock.wait_for(lambda: not self._acting)
            if self._driver.finished() or not self._driver.has_rank_assignment(host, slot):
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
                while self._waiting.get(key) is mine and not self._driver.finished():
                    self._lock.wait(1.0)
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


LAUNCHER: tuple[Edit, ...] = (
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
        name="rendezvous-backlog",
        file="horovod/runner/http/http_server.py",
        old=(
            "class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n"
            "    def __init__(self, addr, handler, verbose):\n"
        ),
        new=(
            "class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n"
            "    request_queue_size = 4096\n"
            "\n"
            "    def __init__(self, addr, handler, verbose):\n"
        ),
        why=(
            "five processes may wait to be let in, and those beyond try again after 1, 3 and 7 seconds: a "
            "recovery of 8 processes takes 7 s, and one of 16 takes 25"
        ),
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
