from benchmarks.ampere.run import main

raise SystemExit(main())
