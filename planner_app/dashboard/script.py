"""What Streamlit runs for every session, again after every change. Processes that import it do nothing."""

if __name__ == "__main__":
    from pagecast.planner_app.dashboard.app import main

    main()
