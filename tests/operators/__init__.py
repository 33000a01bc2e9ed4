"""Tests of the room operators/."""
