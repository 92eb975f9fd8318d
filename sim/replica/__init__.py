"""One replica: what it is made of, and its life in simulated time.

`ReplicaSpec` holds all that follows from a scenario and a workload, and makes schedulers. `Replica` serves
arrivals with such a scheduler: `StepClock` says how long its steps take, `Copies` when its transfers end, and
observers are told what happens. Replays, fleets, the server and the dashboard all run this replica.
"""
