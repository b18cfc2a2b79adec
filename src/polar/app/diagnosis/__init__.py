"""Whether this machine and its engine can do what Polar needs, and how to mend what they cannot."""
