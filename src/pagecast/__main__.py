"""`python -m pagecast`: the same as the console script."""

from pagecast.planner_app.cli import main

main()
