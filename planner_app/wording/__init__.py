"""Text for people: quantities, names of figures, and the sentences that explain a forecast.

`sim` gives codes and numbers; this package makes sentences of them, which planner, reports, dashboard and
commands print. It imports only `sim`.
"""
