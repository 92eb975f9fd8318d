"""The simulator: the core that decides, and the parts around it that tell time.

`core` schedules requests and allocates blocks; `machine` knows GPUs and models; `costs` says what a step
takes; `scenario` holds every option; `replay` serves a trace on a simulated replica; `runs` compares with
what real engines did; `fitting` fits step costs to that. Each part imports only those before it.

Importing this package imports nothing else, so that `pagecast.sim.core` stays free of SimPy, pandas and
torch. Import the modules you need: `from pagecast.sim.replay import replay`.
"""
