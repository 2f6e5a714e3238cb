"""The folder that training processes have first on their `PYTHONPATH`."""
