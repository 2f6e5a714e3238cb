"""Edits of Horovod's launcher: its registry of workers, its order of hosts, the features of its build."""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit, add_after

_REGISTRY = "horovod/runner/elastic/registration.py"
_UTIL = "horovod/common/util.py"
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
    # Without the next five, a worker that is restarted while it waits counts twice, or another worker stays
    # alone at a barrier. Then ranks wait for each other for ever.
    Edit(
        "registry-lock",
        _REGISTRY,
        "        self._lock = threading.Lock()\n        self._states = {}\n",
        (
            "        self._lock = threading.Condition()\n"
            "        self._states = {}\n"
            "        self._waiting = {}\n"
            "        self._acting = False\n"
        ),
    ),
    Edit("registry-barrier", _REGISTRY, "        self._barrier = None\n", ""),
    Edit(
        "registry-event",
        _REGISTRY,
        "        self._action_event = threading.Event()\n        self._action_event.set()\n",
        "",
    ),
    Edit(
        "registry-reset",
        _REGISTRY,
        "            self._barrier = threading.Barrier(parties=size, action=self._action)\n",
        "",
    ),
    Edit(
        "registry",
        _REGISTRY,
        "        # we should wait for _action finished",
        _REGISTRY_CODE,
        until="    def _on_workers_recorded(self):\n",
    ),
    # Of the hosts that are discovered at once, chance decides which are used and which are spare.
    Edit(
        "host-order",
        "horovod/runner/elastic/discovery.py",
        "lines = set(result.strip()",
        "lines = dict.fromkeys(result.strip()",
    ),
    Edit(
        "host-order-kept",
        "horovod/runner/elastic/discovery.py",
        "available_hosts = set([host for host in host_slots.keys()",
        "available_hosts = list([host for host in host_slots.keys()",
    ),
    # `horovodrun` imports TensorFlow, just to learn whether Gloo is built in: seconds at each start.
    Edit(
        "noted-features",
        "CMakeLists.txt",
        'metadata.json" "\\"dummy\\": \\"none\\"\\n}")',
        'metadata.json" "\\"mpi\\": \\"${HAVE_MPI}\\",\\n\\"gloo\\": \\"${HAVE_GLOO}\\"\\n}")',
    ),
    add_after(
        "noted-features-read",
        _UTIL,
        "EXTENSIONS = ['tensorflow', 'torch', 'mxnet']\n",
        (
            "\n"
            "\n"
            "def _noted(feature):\n"
            '    """Whether the build has noted that it has a feature."""\n'
            "    here = os.path.dirname(os.path.abspath(__file__))\n"
            "    with open(os.path.join(here, os.pardir, 'metadata.json')) as file:\n"
            "        return json.load(file)[feature] == 'TRUE'\n"
        ),
    ),
    Edit(
        "noted-mpi",
        _UTIL,
        (
            "def mpi_built(verbose=False):\n"
            "    for ext_base_name in EXTENSIONS:\n"
            "        built_fn = lambda ext: ext.mpi_built()\n"
            "        result = _check_extension_lambda(\n"
            "            ext_base_name, built_fn, 'built with MPI', verbose)\n"
            "        if result is not None:\n"
            "            return result\n"
            "    return None\n"
        ),
        "def mpi_built(verbose=False):\n    return _noted('mpi')\n",
    ),
    Edit(
        "noted-gloo",
        _UTIL,
        (
            "def gloo_built(verbose=False):\n"
            "    for ext_base_name in EXTENSIONS:\n"
            "        built_fn = lambda ext: ext.gloo_built()\n"
            "        result = _check_extension_lambda(\n"
            "            ext_base_name, built_fn, 'built with Gloo', verbose)\n"
            "        if result is not None:\n"
            "            return result\n"
            "    return None\n"
        ),
        "def gloo_built(verbose=False):\n    return _noted('gloo')\n",
    ),
    # Five processes may wait to be let in, and those beyond try again after 1, 3 and 7 seconds: a recovery
    # of 8 processes takes 7 s, and one of 16 takes 25.
    Edit(
        "rendezvous-backlog",
        "horovod/runner/http/http_server.py",
        (
            "class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n"
            "    def __init__(self, addr, handler, verbose):\n"
        ),
        (
            "class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n"
            "    request_queue_size = 4096\n"
            "\n"
            "    def __init__(self, addr, handler, verbose):\n"
        ),
    ),
    # Python 3.12 has no distutils.
    Edit(
        "no-distutils-cmake",
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    # Python 3.12 has no distutils, and horovodrun imports this module.
    Edit(
        "no-distutils-runner",
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
    ),
)
