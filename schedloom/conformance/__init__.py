"""The conformance suite: every combination of policies holds every invariant, or is refused with a reason.

The suite knows engines only through a laboratory (entry-point group ``schedloom.laboratories``).
"""
