import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

// The page is served from any path, and has fixed names: the server answers with ETags.
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "safe" } },
  resolve: {
    alias: {
      "safe/jsx-runtime": fileURLToPath(new URL("src/safe/jsx-runtime.ts", import.meta.url)),
    },
  },
  build: {
    outDir: "../api/console/static",
    emptyOutDir: true,
    target: "es2023",
    modulePreload: false,
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    chunkSizeWarningLimit: 1000, // of one file in kB; infra/console_page.py limits all of them
    rolldownOptions: {
      output: {
        entryFileNames: "console.js",
        chunkFileNames: "[name].js",
        assetFileNames: "console[extname]",
        codeSplitting: false,
      },
    },
  },
});
