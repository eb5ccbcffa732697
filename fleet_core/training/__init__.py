"""Local training, whichever engine computes the gradients. Numpy only.

``local_round``: the steps of a round, ``personal_round``: the steps of a device's own model. ``round_plans``: what each
client draws. ``inner_steps``: meta-gradients out of plain gradients. ``graph_engine``: gradients by the graph ``train``
of a fleet. ``flops``: floating-point operations of a round. ``augment``: of training images. ``subnormals``: subnormal
numbers as zero.
"""
