"""What a model answers, and how its answers are measured. Numpy only.

``regression``: numbers in the user's unit, how they are scaled for training, and the measures of their errors.
``labels``: any number of labels for a sample, and the measures of their counts.
``task``: the tasks together, and what listings ask of each.
``measured``: what is known of a model's answers, whatever the task.
``anomaly``: how badly a model repeats a sample, when that is an alarm, and the measures of alarms.
``calibration``: how sure answers of a class are, and whether they are as often right.
"""
