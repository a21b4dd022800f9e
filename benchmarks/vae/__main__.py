from benchmarks.vae.run import main

raise SystemExit(main())
