"""Tests of jacstore: a folder for each room, jobs/ for what spans rooms, helpers/ for what several of them use."""
