from benchmarks.profile.run import main

raise SystemExit(main())
