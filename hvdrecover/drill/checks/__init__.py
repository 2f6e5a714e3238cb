"""The checks of a drill: pure functions of witnesses' reports, and looks at what is left behind."""
