"""Drills: does a training script recover from what may happen to it?

The way of a drill: `schedule` decides which faults strike when, `runs` start the script in folders of their
own, `faults` strike, a witness in each training process (`hvdrecover.drill.witness`) writes down what it
does, `testimony` reads that, and `checks` hold it against an undisturbed run.
"""
