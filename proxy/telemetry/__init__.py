"""What the process says of itself: so far, its log lines (`log`)."""
