import { defineConfig, mergeConfig } from "vite";
import page from "./vite.config.ts";

// Bundles of the tests for Node, which run without a browser.
const { base: _base, build: _build, ...shared } = page;
export default mergeConfig(
  shared,
  defineConfig({
    ssr: { noExternal: true },
    build: {
      ssr: true,
      target: "node20",
      minify: false,
      rolldownOptions: {
        input: ["tests/format.test.ts", "tests/pages.test.tsx", "tests/shown.ts"],
        output: { entryFileNames: "[name].mjs" },
      },
    },
  }),
);
