"""Tests of the room rows/."""
