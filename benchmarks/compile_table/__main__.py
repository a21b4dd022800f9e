from benchmarks.compile_table.run import main

raise SystemExit(main())
