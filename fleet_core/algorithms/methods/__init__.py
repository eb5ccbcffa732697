"""The methods, a page each, with the paper's equation beside the line that implements it.

``registry`` has the named methods, one row of choices each; a new method is a page here and a row there
(docs/seam.md). Import ``registry.METHODS`` from outside; the pages are imported by the registry and by tests. No
torch, no numpy.
"""
