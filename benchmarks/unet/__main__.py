from benchmarks.unet.run import main

raise SystemExit(main())
