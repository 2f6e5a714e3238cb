"""The fixtures of the state's tests: a job without a driver, and checkpoint roots in memory."""

from tests.unit.state.conftest import elastic_job, page, process, roots  # noqa: F401
