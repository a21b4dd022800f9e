from benchmarks.kernels.run import main

raise SystemExit(main())
