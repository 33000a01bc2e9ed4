"""Tests of the room problem/."""
