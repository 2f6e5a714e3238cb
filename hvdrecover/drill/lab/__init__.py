"""Several hosts on one machine, of network namespaces, that can be cut off and lose their power."""
