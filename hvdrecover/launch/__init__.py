"""Starting jobs and watching over them; no framework is imported here."""
