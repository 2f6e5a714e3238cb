"""The fixtures of tests that start real jobs."""

from tests.integration.conftest import a_users_shell, jobs, light, no_near_root_is_left, one_thread, start

__all__ = ["a_users_shell", "jobs", "light", "no_near_root_is_left", "one_thread", "start"]
