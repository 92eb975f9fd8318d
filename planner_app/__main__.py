"""`python -m pagecast.planner_app`: the same as the console script."""

from pagecast.planner_app.cli import main

main()
