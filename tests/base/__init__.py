"""Tests of the room base/."""
