"""What a drill checks: pure functions of what witnesses have told, and looks at what is left behind."""
