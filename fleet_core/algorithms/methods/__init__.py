"""The methods, one module each, with the paper's equation beside the line that implements it.

``registry`` lists the named methods, one row of choices each. A new method is a module here and a row there
(docs/seam.md). From outside, import ``registry.METHODS``. No torch, no numpy.
"""
