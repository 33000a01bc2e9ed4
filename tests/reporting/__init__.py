"""Tests of the room reporting/."""
