"""How a kernel is cut into tiles, items and slabs so that its memory suffices.

`options` are what is asked for, `steps` leaves contracted together, `rates` what decides how, `memory` what a choice
holds, `schedule` the choice, `plan` its value, `arrays` what it makes on disk, `requests` what it asks of a bucket,
`reports` what a gram says of itself.
"""
